"""--help in its levels."""

import pytest

from vllm_clone.config.flags import flags_of
from vllm_clone.entrypoints.cli import serve
from vllm_clone.entrypoints.cli.main import COMMANDS, main

GROUPS = serve.GROUPS
FLAGS = [spec for group in GROUPS for spec in flags_of(group)]


@pytest.fixture
def help_of(capsys):
    def run(*argv: str) -> str:
        assert main(argv) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.mark.parametrize("argv", [(), ("-h",), ("--help",)])
def test_the_program_lists_its_commands(help_of, argv):
    out = help_of(*argv)
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(help_of, command):
    assert help_of(command, "--help").startswith(f"usage: vllm {command} ")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_serve_shows_groups_with_their_meaning_and_no_flag_of_theirs(help_of, flag):
    out = help_of("serve", flag)
    for group in GROUPS:
        assert group.__name__.replace("FrontendConfig", "Frontend").replace("ServeConfig", "serve") in out
        assert group.__doc__.splitlines()[0] in out
    assert "--max-model-len" not in out
    assert "model_tag" in out


def test_all_shows_every_flag_with_help_and_default(help_of):
    out = " ".join(help_of("serve", "--help=all").split())
    for spec in FLAGS:
        assert f"{spec.name}" in out
        assert " ".join(spec.help.split()) in out
    assert "(default: 8000)" in out
    assert '(default: ["*"])' in out


@pytest.mark.parametrize("word", ["SchedulerConfig", "schedulerconfig", "SCHEDULERCONFIG"])
def test_a_group_is_shown_alone_whatever_the_case(help_of, word):
    out = help_of("serve", f"--help={word}")
    assert "--max-num-seqs" in out
    assert "--no-scheduler-reserve-full-isl" in out
    assert "--port" not in out


@pytest.mark.parametrize("word", ["max-model-len", "max_model_len", "--max-model-len", "MAX-MODEL"])
def test_a_flag_is_found_by_part_of_its_name(help_of, word):
    out = help_of("serve", f"--help={word}")
    assert "--max-model-len" in out
    assert "--max-num-seqs" not in out


def test_a_word_that_matches_nothing_says_so_and_where_to_look(help_of):
    out = help_of("serve", "--help=zzz")
    assert "No group or flag matches 'zzz'" in out
    assert "--help=all" in out


def test_help_wins_over_mistakes_on_the_line(help_of):
    assert "--port" in help_of("serve", "M", "--bad-flag", "1", "--help=all")
