"""The fields of a request that name its program, checked, and its API key."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256

from continuum_lmcache.errors import RequestError
from continuum_lmcache.tools.shell_key import levels
from continuum_lmcache.types import ProgramId, ToolKey

FIELDS = ("job_id", "is_last_step", "this_func_call", "last_func_call", "program_turns", "program_age_s")
OWNER_FIELD = "continuum_owner"  # the API server sets these; they are never taken from a client
HINT_FIELD = "continuum_hint"
UNUSED_FIELD = "continuum_unused"  # names of fields with bad values
TOOLS_FIELD = "continuum_tools"  # a digest of the names of the offered tools
SERVER_FIELDS = (OWNER_FIELD, HINT_FIELD, UNUSED_FIELD, TOOLS_FIELD)
MAX_CHARS = 256
MOST_TURNS = 10_000  # upper bound of `program_turns`
MOST_AGE_S = 86_400.0  # upper bound of `program_age_s`
REFUSED = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # controls; UTF-8 has no lone surrogates
YES = ("true", "1", "yes")
NO = ("false", "0", "no", "")


@dataclass(frozen=True, slots=True)
class ProgramFields:
    """The fields of a request about its program. `job_id` None: it names none."""

    job_id: str | None = None
    is_last_step: bool = False
    this_tool: ToolKey = ()
    last_tool: ToolKey = ()
    turns: int = 0  # finished turns of the program, here or elsewhere; 0: not given
    age_s: float = 0.0  # since the program's start
    owner: str = ""  # a hash of the API key, the program's tenant; "": there are no keys
    hint: str = ""  # a name that several programs may share; "": none
    tools: str = ""  # a digest of the offered tools; "": none

    @property
    def scope(self) -> tuple[str, str | None]:
        """Prompts are linked only within it: those of one owner and one name, or without a name."""
        return self.owner, self.job_id


def parse(fields: Mapping[str, object]) -> ProgramFields:
    """Read the given fields of FIELDS. Raises RequestError with the problem and what to do."""
    return ProgramFields(
        job_id=name("job_id", fields.get("job_id")),
        is_last_step=flag("is_last_step", fields.get("is_last_step")),
        this_tool=tool("this_func_call", fields.get("this_func_call")),
        last_tool=tool("last_func_call", fields.get("last_func_call")),
        turns=int(number("program_turns", fields.get("program_turns"), MOST_TURNS, whole=True)),
        age_s=number("program_age_s", fields.get("program_age_s"), MOST_AGE_S),
        owner=name(OWNER_FIELD, fields.get(OWNER_FIELD)) or "",
        hint=name(HINT_FIELD, fields.get(HINT_FIELD)) or "",
        tools=name(TOOLS_FIELD, fields.get(TOOLS_FIELD)) or "",
    )


def namespace_of(cache_salt: str | None, owner: str) -> str:
    """Where a request's names and KV are: its API key's, if keys are used, and its cache salt's; "": neither.

    Limits and what is learned go by the key alone, a program's tenant: a client may send as many salts as it
    likes.
    """
    return f"{owner}/{cache_salt or ''}" if owner else cache_salt or ""


def program_id(job_id: str, namespace: str | None) -> ProgramId:
    """A program's name in this engine: ids of different namespaces never collide.

    `id@digest` in a namespace. Without one no name ends in `@digest` or equals an inferred one, `~id`.
    """
    if not namespace:
        return ProgramId(f"{job_id}@" if "@" in job_id or job_id.startswith("~") else job_id)
    text = namespace.encode("utf-8", "surrogatepass")  # JSON can contain lone surrogates
    return ProgramId(f"{job_id}@{sha256(text).hexdigest()[:12]}")


def hidden(program: str, key: bytes) -> ProgramId:
    """Its name in tables that no client's own words may reach: 32 hexadecimal digits. `key`: 1 to 64 bytes.

    Processes with the same key agree. A client that does not know it cannot choose names of one remainder.
    """
    digest = blake2b(program.encode("utf-8", "surrogatepass"), digest_size=16, key=key)
    return ProgramId(digest.hexdigest())


def key_digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def accepted_key(authorization: str, digests: Iterable[bytes]) -> bytes | None:
    """The digest of a header's bearer token, if it is one of these; None: vLLM refuses such a request."""
    scheme, _, token = authorization.partition(" ")
    sent = key_digest(token)
    matches = [hmac.compare_digest(sent, digest) for digest in digests]
    return sent if scheme.lower() == "bearer" and any(matches) else None


def name(field: str, value: object) -> str | None:
    """Text of 1 to MAX_CHARS characters, none of them REFUSED, or a whole number; null is no name."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestError(f"{field} must be text, not {kind(value)}; send a string such as 'run-42'")
    if isinstance(value, int) and abs(value) >= 10**18:  # the text of a huge int takes quadratic time
        raise RequestError(f"{field} is a number of more than 18 digits; send a string")
    text = str(value)
    if not 1 <= len(text) <= MAX_CHARS:
        raise RequestError(f"{field} has {len(text)} characters; it must have 1 to {MAX_CHARS}")
    if REFUSED.search(text):
        problem = "has a control character or a lone surrogate"
        raise RequestError(f"{field} {problem}; send printable text such as 'run-42'")
    return text


def flag(field: str, value: object) -> bool:
    """true or false, as JSON or as text; null is false."""
    if value is None or isinstance(value, bool):
        return bool(value)
    text = str(value).strip().lower() if isinstance(value, str | int | float) and len(str(value)) < 9 else "?"
    if text not in YES + NO:
        raise RequestError(f"{field} is {value!r:.40}; it must be true or false")
    return text in YES


def number(field: str, value: object, most: float, whole: bool = False) -> float:
    """A number from 0 to `most`; null is 0."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{field} must be a number, not {kind(value)}")
    if not 0 <= value <= most or (whole and value != int(value)):  # false for nan too
        raise RequestError(f"{field} must be a {'whole ' if whole else ''}number from 0 to {most:g}")
    return float(value)


def tool(field: str, value: object) -> ToolKey:
    """A client's own name for a tool, as a key, which wins over parsing; empty text is none."""
    text = name(field, value if value != "" else None)
    return () if text is None else levels(text)


def kind(value: object) -> str:
    words = {dict: "an object", list: "a list", str: "text", bool: "true or false", float: "a fraction"}
    return words.get(type(value), type(value).__name__)
