"""A shell command as simple commands and words.

Not a shell: quotes, substitutions, redirections, here-documents and separators are told apart so
that the words are the right ones; nothing is expanded. One pass, linear in the text, never raises.
"""

from __future__ import annotations

import re

PIECE = re.compile(
    r"(?P<space>[ \t\r]+|\\\n)"
    r"|(?P<here><<-?(?!<))"
    r"|(?P<redirect>&>>?|[0-9]{0,2}(?:<<<|<>|>>|>\||[<>]&?))"
    r"|(?P<end>&&|\|[|&]?|;+|&|\n)"
    r"|(?P<open>\$?\()|(?P<close>\))"
    r"|(?P<quoted>'[^']*'?|\"(?:[^\"\\]|\\.)*\"?|`[^`]*`?)"
    r"|(?P<text>[^\s'\"\\;&|()<>`$]+|\\?.)",
    re.DOTALL,
)


def steps(command: str) -> list[list[str]]:
    """The simple commands of a compound, as words without quotes, redirections and bodies."""
    return ShellLexer(command).split()


class ShellLexer:
    """One pass over a command's text."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.found: list[list[str]] = []
        self.words: list[str] = []
        self.word = ""
        self.drop = ""  # "redirect", "here": what the next word is, if it is not the program's
        self.delimiters: list[str] = []  # of the here-documents that begin at the next line

    def split(self) -> list[list[str]]:
        at, depth = 0, 0
        while at < len(self.command):
            piece = PIECE.match(self.command, at)
            assert piece is not None  # the last alternative takes any character
            kind, text, at = piece.lastgroup, piece[0], piece.end()
            if depth or (kind == "open" and (text == "$(" or self.word)):
                depth += (kind == "open") - (kind == "close")
                self.word += text  # a substitution is part of its word, whatever it runs
            elif text.startswith("#") and not self.word:
                at = self.line_end(at)
            elif kind in ("text", "quoted"):
                self.word += unquoted(text)
            else:
                at = self.boundary(kind or "", text, at)
        self.end_step()
        return self.found

    def boundary(self, kind: str, text: str, at: int) -> int:
        """A word ends here, perhaps a step too. Returns where to go on."""
        if kind in ("space", "here", "redirect"):
            self.end_word()
            self.drop = kind if kind != "space" else self.drop
            return at
        self.end_step()
        return self.after_bodies(at) if text == "\n" else at

    def end_word(self) -> None:
        if not self.word:
            return
        if self.drop == "here":
            self.delimiters.append(self.word)
        elif not self.drop:
            self.words.append(self.word)
        self.word = self.drop = ""

    def end_step(self) -> None:
        self.end_word()
        if self.words:
            self.found.append(self.words)
        self.words, self.drop = [], ""

    def after_bodies(self, at: int) -> int:
        """Past the here-documents that begin at `at`; the rest is theirs where one never ends."""
        for delimiter in self.delimiters:
            found = self.command.find(f"\n{delimiter}", at - 1)
            if found < 0:
                at = len(self.command)
                break
            at = self.line_end(found + 1)
        self.delimiters = []
        return at

    def line_end(self, at: int) -> int:
        found = self.command.find("\n", at)
        return found if found >= 0 else len(self.command)


def unquoted(text: str) -> str:
    """A piece of a word as the program would see it."""
    if text[0] in "'\"`":
        return text[1:-1] if len(text) > 1 and text[-1] == text[0] else text[1:]
    return text[1:] if text[0] == "\\" else text
