"""Programs without ids are distinguished by their prompts, on our own programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest
from unnamed_programs import BLOCK_TOKENS, Branch, Replay
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from continuum_lmcache.programs.identity import ProgramFields
from continuum_lmcache.programs.prompt_linker import MAX_TAILS, PromptLinker
from continuum_lmcache.programs.turns import prompt_key
from continuum_lmcache.types import ProgramId
from experiments.driver import Plan
from experiments.table1 import generate
from experiments.workload import Program, TurnSpec, poisson_arrivals, scaled

CLOSING = (11, 12, 13, 14, 15, 16)  # of a prompt, by a template: a message's end, a role, an opening
SYSTEM = tuple(range(1000, 1100))
PLAN = Plan("", 1, range(300, 30_000))
NEW = Branch(Program("p", 0.0, ()), "red")


def programs(count: int = 60, marks: int = 10) -> tuple[Program, ...]:
    """Table 1's, small, each message in `marks` tokens of a chat template."""
    drawn = scaled(generate("swe", count, 1), 1500)
    return poisson_arrivals([replace(p, turns=marked(p.turns, marks)) for p in drawn], 1.0, 1)


def marked(turns: Sequence[TurnSpec], marks: int) -> tuple[TurnSpec, ...]:
    return tuple(
        replace(turn, input_tokens=turn.input_tokens + index * marks, new_tokens=turn.new_tokens + marks)
        for index, turn in enumerate(turns, 1)
    )


class TemplateReplay(Replay):
    """Every prompt ends with the same tokens."""

    def __init__(self, plan: Plan, closing: tuple[int, ...]) -> None:
        super().__init__(plan)
        self.closing = closing

    def request(self, branch: Branch, prompt: tuple[int, ...]) -> Request:
        return super().request(branch, (*prompt[: -len(self.closing)], *self.closing))


def turns() -> Callable[[Sequence[int]], str]:
    """A function that sends a prompt as a turn, which ends; returns the program that it continues, or ""."""
    prompt_linker, replay, names = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN), count()

    def turn(tokens: Sequence[int]) -> str:
        request = replay.request(NEW, tuple(tokens))
        link = prompt_linker.find_link(request)
        request.append_output_token_ids([7] * 8)
        program = link.program if link else ProgramId(f"program {next(names)}")
        prompt_linker.add_turn(request, program, 0.0, link.tokens if link else 0)
        return program if link else ""

    return turn


def shortened(program: Program, tokens: int) -> Program:
    """Each prompt drops this many of the last prompt's tokens, and the answer after them."""
    before = (tokens, *(turn.input_tokens for turn in program.turns))
    cut = (
        replace(turn, new_tokens=turn.input_tokens - min(turn.kept_tokens, last - tokens))
        for last, turn in zip(before, program.turns, strict=False)
    )
    return replace(program, turns=tuple(cut))


def test_every_turn_finds_its_own_programs_last_one_and_no_other_tenants() -> None:
    counts = Replay(PLAN).run(programs())
    assert counts["wrong"] == counts["other tenant"] == counts["unlinked"] == 0
    assert counts["right"] > 1000 and counts["forks"] > 40
    assert counts["begun anew"] >= 2 * 60, "each program once for each tenant"


def test_answers_that_come_back_without_their_thoughts_are_linked_too() -> None:
    counts = Replay(PLAN).run([shortened(p, 0) for p in programs()])
    assert counts["wrong"] == counts["other tenant"] == 0
    ambiguous = counts["unlinked"]  # several draws for one prompt are ambiguous
    assert counts["right"] >= 0.95 * (counts["right"] + ambiguous)


@pytest.mark.parametrize(("tokens", "closing"), [(1, 6), (4, 6), (5, 8), (25, 30), (63, 64)])
def test_a_first_prompt_whose_last_tokens_no_history_repeats_is_linked(tokens: int, closing: int) -> None:
    """A template that opens the answer with <think>, or with a sentence on how long to think, has it in the
    prompt, and in no later one."""
    replay = TemplateReplay(PLAN, tuple(range(11, 11 + closing)))
    counts = replay.run([shortened(p, tokens) for p in programs(30, closing + 4)])
    assert counts["wrong"] == counts["other tenant"] == 0
    assert counts["right"] >= 0.9 * (counts["right"] + counts["unlinked"])


def test_two_prompts_with_the_same_text_and_other_images_are_two() -> None:
    """The image lies behind the last whole block, so no hash covers it."""
    prompt_linker, replay = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN)
    tail = len(SYSTEM) // BLOCK_TOKENS * BLOCK_TOKENS

    def request(tokens: Sequence[int], image: str) -> Request:
        sent = replay.request(NEW, tuple(tokens))
        place = PlaceholderRange(offset=tail + 1, length=2)
        sent.mm_features = [MultiModalFeatureSpec(None, "image", image, place)]
        return sent

    first = request(SYSTEM, "a cat")
    assert prompt_linker.find_link(first) is None
    first.append_output_token_ids([7] * 8)
    prompt_linker.add_turn(first, ProgramId("cat"), 0.0)
    later = (*first.all_token_ids, *range(500, 540))
    assert prompt_linker.find_link(request(later, "a dog")) is None
    link = prompt_linker.find_link(request(later, "a cat"))
    assert link is not None and link.program == "cat"
    no_fields = ProgramFields()
    keys = {prompt_key("", no_fields, request(SYSTEM, image), BLOCK_TOKENS) for image in ("a cat", "a dog")}
    assert len(keys) == 2


def test_programs_whose_short_first_prompts_share_a_system_prompt_are_not_linked() -> None:
    prompt_linker, replay = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN)
    for name in range(4):
        request = replay.request(NEW, (*range(1000, 1200), *range(100 * name, 100 * name + 6)))
        assert prompt_linker.find_link(request) is None
        request.append_output_token_ids([7, name])
        prompt_linker.add_turn(request, ProgramId(str(name)), 0.0)


@pytest.mark.parametrize("closing", range(1, 7))
@pytest.mark.parametrize("message", range(1, 4))
@pytest.mark.parametrize("earlier", ["none", "other", "equal", "other and equal"])
def test_no_program_goes_on_with_a_stranger_whose_short_prompt_has_its_system_prompt(
    closing: int, message: int, earlier: str
) -> None:
    """The template closes both with the same tokens; the stranger's message may begin as the other does."""
    end, hi = CLOSING[-closing:], range(300, 300 + message)
    turn = turns()
    if "other" in earlier:
        turn((*SYSTEM, *range(400, 430), *end))
    for _ in range(2 if "equal" in earlier else 1):
        turn((*SYSTEM, *hi, *end))
    assert not turn((*SYSTEM, *range(500, 540), *end))
    assert not turn((*SYSTEM, *hi, *range(500, 540), *end))


def test_a_short_first_prompt_is_continued_by_its_own_next_turn() -> None:
    turn = turns()
    for story in range(3):
        hi = (*SYSTEM, 300 + story, *CLOSING)
        turn(hi)
        kept = hi[:-4]  # the opening does not come back
        assert bool(turn((*kept, *[7] * 8, *range(500, 540), *CLOSING))) == (story > 0)


def test_a_turn_is_linked_again_after_its_continuation_did_not_end_and_takes_no_more_room() -> None:
    prompt_linker, replay = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN)
    fields = ProgramFields(hint="a session")
    request = replay.request(NEW, SYSTEM)
    prompt_linker.add_turn(request, ProgramId("p"), 0.0, fields=fields)
    next_prompt = replay.request(NEW, (*SYSTEM, *range(500, 540)))
    for _ in range(3 * MAX_TAILS):
        link = prompt_linker.find_link(next_prompt, fields)
        assert link is not None and link.program == "p"
        assert len(prompt_linker) == 0 and not prompt_linker._hinted
        assert prompt_linker.find_link(next_prompt, fields) is None, "it is continued once at a time"
        prompt_linker.put_back(link, link.program)
    assert len(prompt_linker) == 1 and [len(turns) for turns in prompt_linker._hinted.values()] == [1]


def test_a_turn_put_back_beside_an_equal_one_is_ambiguous() -> None:
    prompt_linker, replay = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN)
    prompt_linker.add_turn(replay.request(NEW, SYSTEM), ProgramId("p"), 0.0)
    next_prompt = replay.request(NEW, (*SYSTEM, *range(500, 540)))
    link = prompt_linker.find_link(next_prompt)
    assert link is not None
    prompt_linker.add_turn(replay.request(NEW, SYSTEM), ProgramId("other"), 0.0)
    prompt_linker.put_back(link, link.program)
    assert prompt_linker.find_link(next_prompt) is None


@pytest.mark.parametrize("contexts", [(0, 0), (0, 100), (100, 0)])
def test_of_two_draws_for_one_prompt_neither_is_taken_for_the_other(contexts: tuple[int, int]) -> None:
    """Both are kept with keys at the prompt's end and a little before it."""
    prompt_linker, replay = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN)
    before = replay.request(NEW, (*range(3000, 3200), *range(1190, 1200)))  # the template's closing is known
    prompt_linker.add_turn(before, ProgramId("before"), 0.0)
    for draw, matched_tokens in enumerate(contexts):
        request = replay.request(NEW, tuple(range(1000, 1200)))
        request.append_output_token_ids([draw] * 9)
        prompt_linker.add_turn(request, ProgramId(f"draw {draw}"), 0.0, matched_tokens)
    assert prompt_linker.find_link(replay.request(NEW, (*range(1000, 1200), 7, 7, 7))) is None
    assert prompt_linker.find_link(replay.request(NEW, (*range(1000, 1190), 7, 7, 7))) is None
    told_apart = prompt_linker.find_link(replay.request(NEW, (*range(1000, 1200), *[1] * 9, 5)))
    assert told_apart is not None and told_apart.program == "draw 1"


# a message that was cut short, as AgentX's harness does --------------------------


HISTORY = (*SYSTEM, *range(2000, 2200))


@pytest.mark.parametrize("dropped", [1, 20, 63, 80])
def test_a_prompt_that_cuts_its_last_message_short_continues_its_turn(dropped: int) -> None:
    """Each turn's message ends with a text that the next prompt has not."""
    turn, told, program = turns(), HISTORY, ""
    turn((*range(9000, 9200), *CLOSING))  # the template's closing is known
    for number in range(4):
        found = turn((*told, *range(5000, 5000 + dropped), *CLOSING))
        assert found == program or number == 1
        program = found
        assert bool(program) == (number > 0)
        told = (*told, *CLOSING, *[7] * 8, *range(3000 + 50 * number, 3040 + 50 * number))


def test_a_prompt_that_drops_a_short_message_whole_continues_its_turn() -> None:
    turn, opens = turns(), (*CLOSING[:2], 17)  # a user's message; CLOSING[2] is the answer's role
    turn((*range(9000, 9200), *CLOSING))
    turn((*HISTORY, *opens, *range(5000, 5020), *CLOSING))
    assert turn((*HISTORY, *CLOSING, *[7] * 8, *range(3000, 3040), *CLOSING))


@pytest.mark.parametrize("opens", [(), (*CLOSING[:2], 17)], ids=["a message's rest", "a message"])
@pytest.mark.parametrize("message", [1, 2, 30])
def test_a_prompt_that_has_another_message_there_is_no_next_turn(
    message: int, opens: tuple[int, ...]
) -> None:
    """A fork, or a program with the same head: its message is another one, with an answer or without."""
    for follows in ((), (*[7] * 8, *range(3000, 3100), *CLOSING)):
        turn = turns()
        turn((*range(9000, 9200), *CLOSING))
        turn((*HISTORY, *opens, *range(5000, 5000 + message), *CLOSING))
        other = (*range(6000, 6008), *range(6500, 6540))
        assert not turn((*HISTORY, *opens, *other, *CLOSING, *follows))


def test_two_turns_that_differ_only_in_what_is_dropped_are_ambiguous() -> None:
    turn = turns()
    turn((*range(9000, 9200), *CLOSING))
    for number in range(2):
        turn((*HISTORY, *range(5000 + 50 * number, 5030 + 50 * number), *CLOSING))
    assert not turn((*HISTORY, *CLOSING, *[7] * 8, *range(3000, 3040), *CLOSING))


def test_a_hint_settles_which_of_two_such_turns_goes_on() -> None:
    prompt_linker, replay = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN)
    fields = [ProgramFields(hint=name) for name in "ab"]
    prompt_linker.add_turn(replay.request(NEW, (*range(9000, 9200), *CLOSING)), ProgramId("before"), 0.0)
    for number, of in enumerate(fields):
        dropped = range(5000 + 50 * number, 5030 + 50 * number)
        request = replay.request(NEW, (*HISTORY, *dropped, *CLOSING))
        assert prompt_linker.find_link(request, of) is None
        prompt_linker.add_turn(request, ProgramId(of.hint), 0.0, fields=of)
    later = replay.request(NEW, (*HISTORY, *CLOSING, *[7] * 8, *range(3000, 3040), *CLOSING))
    assert prompt_linker.find_link(later) is None
    link = prompt_linker.find_link(later, fields[1])
    assert link is not None and link.program == "b"


@pytest.mark.parametrize("hint", ["a session", ""])
def test_of_one_hint_a_later_turn_goes_on_with_another_text_in_its_last_message(hint: str) -> None:
    """AgentX's harness lengthens a message so where a turn adds less than a block. Of first prompts it is no
    reason: several sessions may have a hint and a system prompt."""
    prompt_linker, replay, fields = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN), ProgramFields(hint=hint)
    other = replay.request(NEW, (*range(9000, 9200), *CLOSING))
    prompt_linker.add_turn(other, ProgramId("other"), 0.0, fields=fields)
    links = []
    for number, message in enumerate((range(5000, 5030), range(6000, 6060), range(7000, 7070))):
        request = replay.request(NEW, (*HISTORY, *message, *CLOSING))
        links.append(prompt_linker.find_link(request, fields))
        matched_tokens = len(HISTORY) if number else 0
        prompt_linker.add_turn(request, ProgramId("p"), 0.0, matched_tokens, fields)
    assert [link is not None for link in links] == [False, False, bool(hint)]


def test_a_message_with_an_image_at_its_end_is_linked_only_as_it_is() -> None:
    prompt_linker, replay = PromptLinker(100, BLOCK_TOKENS), Replay(PLAN)
    prompt_linker.add_turn(replay.request(NEW, (*range(9000, 9200), *CLOSING)), ProgramId("before"), 0.0)
    place = PlaceholderRange(offset=len(HISTORY) + 4, length=8)
    feature = MultiModalFeatureSpec(None, "image", "a cat", place)
    sent = [
        replay.request(NEW, (*HISTORY, *range(5000, 5000 + message), *CLOSING, *more))
        for message, more in ((30, ()), (12, ([7] * 40)), (30, ([7] * 40)))
    ]
    for request in sent:
        request.mm_features = [feature]
    prompt_linker.add_turn(sent[0], ProgramId("p"), 0.0)
    assert prompt_linker.find_link(sent[1]) is None
    assert prompt_linker.find_link(sent[2]) is not None
