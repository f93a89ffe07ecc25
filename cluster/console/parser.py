"""The argument parser of all commands: one-line errors, and help that fits the terminal."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

from infra.errors import UsageError

SubParsers = Any
# Positional arguments that are the words of another parser or program.
_NOT_OURS = (argparse.PARSER, argparse.REMAINDER)


class Command(NamedTuple):
    """A command's module, whose ``add_parser`` defines its options, and its line in ``--help``."""

    module: str
    help: str = ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs at the terminal's width; leaves indented lines, such as examples, unchanged."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts: list[str] = []
        paragraph: list[str] = []
        for line in [*text.rstrip().splitlines(), ""]:
            if line and not line.startswith(" "):
                paragraph.append(line)
                continue
            if paragraph:
                joined = " ".join(paragraph)
                parts.append(textwrap.fill(joined, width, break_on_hyphens=False))
                paragraph = []
            # Keep an example's command on one line; its comment moves below if both don't fit.
            command, *comment = re.split(r"(?<=\S)\s{2,}", line, maxsplit=1)
            fits = len(line) <= width or not comment
            parts += [line] if fits else [command, f"      {comment[0]}"]
        return "\n".join(parts).rstrip("\n")


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1; a ``type`` for argparse."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def opposite(flag: str) -> str:
    """Return the option that cancels an earlier switch: ``--no-detach`` for ``--detach``, and vice versa."""
    return flag.replace("--no-", "--", 1) if flag.startswith("--no-") else f"--no-{flag[2:]}"


def add_json_option(parser: argparse.ArgumentParser, what: str = "the result") -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON on stdout")


def add_yes_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--yes", "-y", action="store_true", help=what)


class Parser(argparse.ArgumentParser):
    """Reports mistakes in one line instead of the full usage, and can hide expert options from the help."""

    _for_experts: Collection[argparse.Action] = ()
    _shows_all = False

    def hide_from_help(self, names: Collection[str]) -> None:
        """Show these options, named by ``dest``, only in ``--help --advanced``; they work as usual."""
        self._for_experts = [action for action in self._actions if action.dest in names]
        self.add_argument("--advanced", action="help", help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """Return the help; without ``--advanced``, it says how many options are hidden."""
        if self._shows_all or not self._for_experts:
            return super().format_help()
        texts, epilog = [action.help for action in self._for_experts], self.epilog
        more = f"`--help --advanced` shows {len(texts)} more options for experts."
        self.epilog = f"{more}\n\n{epilog}"
        for action in self._for_experts:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            self.epilog = epilog
            for action, text in zip(self._for_experts, texts, strict=True):
                action.help = text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where similar names are known."""
        # `--help` acts as soon as it is parsed, and `--advanced` may follow it.
        self._shows_all = "--advanced" in (args or ())
        known, rest = super().parse_known_args(self._cancel_switches(args), namespace)
        if rest:
            what = "option" if rest[0].startswith("-") else "argument"
            self.error(f"unknown {what} {rest[0]!r}{self._nearest(rest[0])}")
        return known, rest

    def _cancel_switches(self, words: Any) -> Any:
        """Return the words without switches that an opposite follows, such as those of spr-cluster.toml."""
        if words is None or any(each.nargs in _NOT_OURS for each in self._actions):
            return words
        end = words.index("--") if "--" in words else len(words)
        switches = {
            name for each in self._actions if each.nargs == 0 for name in each.option_strings
        }
        found: list[str] = []
        for word in words[:end]:
            if opposite(word) in switches:
                found = [each for each in found if each != opposite(word)]
            else:
                found.append(word)
        return [*found, *words[end:]]

    def _nearest(self, word: str) -> str:
        known = [name for action in self._actions for name in action.option_strings]
        names = [name.lstrip("-") for name in known if name.startswith("--")]
        given = word.partition("=")[0].lstrip("-")
        near = [name for name in names if given and name.startswith(given)]
        near = near or difflib.get_close_matches(given, names, n=1)
        return f"; did you mean --{near[0]}?" if near and word.startswith("-") else ""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


def add_command(
    subparsers: SubParsers,
    name: str,
    description: str,
    examples: str,
    help_: str | None = None,
    run: Callable[[argparse.Namespace], int] | None = None,
) -> Parser:
    """Return a command's parser, with examples at the end of its help.

    A subcommand is listed only with ``help_``. Omit ``run`` for a command that only has subcommands.
    """
    parser: Parser = subparsers.add_parser(
        name,
        **({"help": help_} if help_ else {}),
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(verb=name, **({"run": run} if run else {}))
    return parser
