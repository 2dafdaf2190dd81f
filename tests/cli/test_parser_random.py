"""Whatever is typed, the parser answers with values or with one line."""

import contextlib
import io

import hypothesis.strategies as st
from hypothesis import given, settings

from vllm_clone.config import ENGINE_GROUPS, FrontendConfig
from vllm_clone.config.flags import flags_of, human_int
from vllm_clone.entrypoints.cli import serve
from vllm_clone.entrypoints.cli.parser import FlagParser, HelpShown, UsageError

NAMES = [spec.name for group in (FrontendConfig, *ENGINE_GROUPS.values()) for spec in flags_of(group)]
VALUES = [
    "1",
    "-1",
    "auto",
    "4k",
    "true",
    "",
    "None",
    "{}",
    "[]",
    '["a"]',
    '{"a": 1}',
    "nan",
    "1e999",
    "--",
    "-",
    "=",
    "%s",
]
WORDS = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(VALUES),
    st.builds("{}={}".format, st.sampled_from(NAMES), st.sampled_from(VALUES)),
    st.builds(lambda name, cut: name[: 3 + cut], st.sampled_from(NAMES), st.integers(0, 20)),
    st.text(max_size=8),
    st.builds("--{}".format, st.text(max_size=8)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=6))
def test_no_command_line_ends_in_anything_but_values_or_a_usage_error(argv):
    parser = FlagParser("vllm serve", serve.USAGE, "Serve.")
    serve.add_arguments(parser)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(UsageError, HelpShown):
        parser.parse(argv)


@given(st.integers(-(10**15), 10**15))
def test_a_plain_integer_is_itself_and_suffixes_multiply(number):
    assert human_int(str(number)) == number
    assert human_int(f"{number}k") == number * 1000
    assert human_int(f"{number}K") == number * 1024


@given(st.integers(0, 10**9), st.integers(0, 999))
def test_decimal_fractions_are_exact(whole, thousandths):
    assert human_int(f"{whole}.{thousandths:03}k") == whole * 1000 + thousandths
