"""`vllm completion`: a script that teaches a shell the commands, their flags and the values that flags choose from."""

import argparse
from collections.abc import Iterable

from vllm_clone.entrypoints.cli.parser import FlagParser

USAGE = 'vllm completion bash|zsh    eval "$(vllm completion bash)" in ~/.bashrc, or zsh in ~/.zshrc'
SHELLS = ("bash", "zsh")
FUNCTION = """\
_vllm() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=
  if [ "$COMP_CWORD" -gt 2 ]; then
    case "$command ${COMP_WORDS[2]}" in
@KINDS@) command="$command ${COMP_WORDS[2]}" ;;
    esac
  fi
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "@COMMANDS@" -- "$cur"))
    return
  fi
  case "$command $prev" in
@VALUES@
  esac
  if [ -z "$words" ]; then
    case "$command" in
@FLAGS@
    esac
    case "$cur" in
      -*) ;;
      *) words= ;;
    esac
  fi
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
  else
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}
complete -o filenames -F _vllm vllm
"""
BEFORE = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def add_arguments(parser: FlagParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="Which shell the script is for.")


def run(args: argparse.Namespace) -> int:
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    """The script for one of :data:`SHELLS`."""
    from vllm_clone.entrypoints.cli.main import COMMANDS, parser_of

    flags, values = [], []
    for name in COMMANDS:
        actions = parser_of(name)[0]._actions
        options = sorted({o for a in actions for o in a.option_strings if o.startswith("--")})
        flags.append(f'      "{name}") words="{_words(options)}" ;;')
        if name == "bench":
            kinds = ["serve", *(other.split()[1] for other in COMMANDS if " " in other)]
            values.append(f'    "bench bench") words="{_words(kinds)}" ;;')
        for action in actions:
            choices = getattr(getattr(action, "spec", None), "choices", None) or action.choices
            if choices:
                patterns = "|".join(f'"{name} {option}"' for option in action.option_strings) or f'"{name} {name}"'
                values.append(f'    {patterns}) words="{_words(choices)}" ;;')
    filled = FUNCTION.replace("@COMMANDS@", " ".join(name for name in COMMANDS if " " not in name))
    filled = filled.replace("@KINDS@", "|".join(f'"{name}"' for name in COMMANDS if " " in name))
    return BEFORE[shell] + filled.replace("@VALUES@", "\n".join(values)).replace("@FLAGS@", "\n".join(flags))


def _words(words: Iterable[object]) -> str:
    """Words of a double-quoted string; such as the shell would read otherwise are left out."""
    return " ".join(word for word in map(str, words) if not set(word) & set(' "$`\\'))
