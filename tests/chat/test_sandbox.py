"""A template cannot reach Python, hold a thread or fill the memory; ordinary ones notice nothing."""

import time
from typing import Any

import jinja2
import pytest

from vllm_clone.chat import sandbox
from vllm_clone.chat.template import render
from vllm_clone.errors import RequestError

VARIABLES: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "big": "x" * 1_000_000}


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_clone.chat.template.MAX_SECONDS", 0.2)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% break %}{% endfor %}{% for k in range(99999) %}"
        "{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [1] recursive %}{% for j in range(99999) %}{{ loop.index }}{% for k in range(9999) %}{% endfor %}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_endless_work_is_stopped(template: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match="ran for more than"):
        render(template, VARIABLES)
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [0] * 1000000000 }}",
        "{% set ns = namespace(x=big) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=big) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(1000) %}{{ big }}{% endfor %}",
        "{{ 2 ** 100000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ '1'.zfill(1000000000) }}",
        "{{ 'a\\nb' | indent(1000000000) }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ big | replace('x', big) }}",
        "{{ big.replace('x', big) }}",
        "{{ range(100000) | join(big) }}",
        "{{ big.join(range(100000) | map('string') | list) }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_huge_results_are_refused_before_they_are_made(template: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"The chat template (cannot render|produced more)"):
        render(template, VARIABLES)
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{% set ns = namespace() %}{% set ns.__x = 1 %}",
        "{{ lipsum() }}",
    ],
)
def test_python_is_out_of_reach(template: str) -> None:
    try:
        rendered = render(template, VARIABLES)
    except RequestError:
        pass
    else:
        assert "class" not in rendered  # undefined, which prints nothing
    assert VARIABLES["messages"] == [{"role": "user", "content": "a"}]


ORDINARY = [
    "{{ 'a' + 'b' }}{{ 1 + 2 }}{{ [1] + [2] }}{{ 3 * 'ab' }}{{ 7 % 4 }}{{ 2 ** 8 }}{{ 2 ** 0.5 }}{{ -7 // 2 }}",
    "{{ 'a' ~ 1 ~ none ~ undefined_thing ~ [1] ~ true }}{% set x = 'a' ~ 'b' ~ ('c' ~ 'd') %}{{ x }}",
    "{{ (1 ~ 2) | int + 1 }}{{ 'x' if 'a' ~ 'b' == 'ab' else 'y' }}{{ ['a' ~ 'b', {'k' ~ 1: 'v' ~ 2}] }}",
    "{{ '%s-%05d' % ('a', 3) }}{{ '%s' % 'x' }}{{ '%s %s' | format('a', 'b') }}{{ '%(k)s' | format(k=1) }}",
    "{{ 'a-b'.replace('-', '+') }}{{ 'aaa'.replace('a', 'b', 2) }}",
    "{{ 'abc'.replace('', '-') }}{{ 'a'.replace('a', '') }}",
    "{{ 'aaa' | replace('a', 'b') }}{{ 'aaa' | replace('a', 'b', 1) }}{{ 5 | replace(5, 6) }}",
    "{{ ['a', 1, none] | join(', ') }}{{ [{'a': 1}, {'a': 2}] | join('/', attribute='a') }}{{ [] | join }}",
    "{{ ', '.join(['a', 'b']) }}{{ 'a,b'.split(',') }}{{ '{} {:>4}'.format('a', 'b') }}{{ ' a '.strip() }}",
    "{{ 'a' | center(5) }}|{{ 'a\nb' | indent(2) }}|{{ [1, 2, 3] | batch(2, 0) | list }}|{{ 2.345 | round(2) }}",
    "{{ 'one two three' | wordwrap(7) }}{{ [1, 2, 3, 4] | slice(2) | list }}{{ 'ab'.ljust(4) }}|{{ '7'.zfill(3) }}",
    "{% set ns = namespace(n=0) %}{% for i in range(5) if i % 2 %}{% set ns.n = ns.n + i %}{{ loop.index }}"
    "{% else %}none{% endfor %}{{ ns.n }}",
    "{% for i in [] %}x{% else %}none{% endfor %}{% for i in [1, 2] %}{{ loop.last }}{% if i == 1 %}{% continue %}"
    "{% endif %}{{ i }}{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}{{ m(1) }}"
    "{% call m(3) %}in{% endcall %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{{ dict(a=1).items() | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [3, 1] | sort }}",
    "{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') | first }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}",
    "{% filter upper %}ab{% endfilter %}{% set t %}x{{ 1 }}{% endset %}{{ t }}{{ t | length }}",
]  # fmt: skip


@pytest.mark.parametrize("template", ORDINARY)
def test_ordinary_templates_render_as_in_plain_jinja(template: str) -> None:
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    assert render(template, VARIABLES) == plain.from_string(template).render(VARIABLES)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': 'é<>&'} | tojson }}", '{"a": "é<>&"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
    ],
)
def test_tojson_writes_plain_json(template: str, text: str) -> None:
    assert render(template, {}) == text


def test_errors_name_the_template_as_the_cause_also_deep_inside() -> None:
    with pytest.raises(RequestError, match="cannot be compiled"):
        render("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})
    with pytest.raises(RequestError, match="syntax error in line 2"):
        render("ok\n{% if %}", {})


def test_one_rendering_does_not_shorten_the_next() -> None:
    render("x", {})
    assert sandbox.deadline.get() == float("inf")
