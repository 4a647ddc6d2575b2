"""Measuring engines: the order, the counts, and what differs from plain decoding is found."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from tiny import CONFIG, dflash_json, dflash_tensors, tiny_target, write_dflash
from torch import Tensor

from foredraft.benchmark import local
from foredraft.benchmark.local import Plan, configurations, converse, fitting, interleaved, measure, measure_workload
from foredraft.benchmark.results import find_differences, first_difference, summarize
from foredraft.benchmark.workloads import Workload
from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import DraftRequest, Proposal, Stop
from foredraft.errors import UserError
from foredraft.llm import LLM
from foredraft.models.batch import Batch
from foredraft.models.loading import Target
from foredraft.sampling_params import SamplingParams

WORKLOAD = Workload("gsm8k", "data-dir", (("ab",), ("cab", "dd"), ("a b",), ("hi!",), ("p",), ("lo", "nk", "g")))
ROOM = 400


@pytest.fixture(scope="module")
def roomy() -> Target:
    return tiny_target(max_position_embeddings=ROOM)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    raw = dflash_json(max_position_embeddings=ROOM)
    return str(write_dflash(tmp_path_factory.mktemp("drafter"), raw, dflash_tensors(raw)))


def plan(*configured: SpeculativeConfig, workload: Workload = WORKLOAD, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"concurrencies": (1,), "max_tokens": 12, "temperature": 0.0, "seed": 0} | changes
    return Plan(configurations=(None, *configured), workloads=(workload,), **settings)


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def quiet(_: str) -> None:
    pass


def test_groups_are_small_and_the_order_differs() -> None:
    groups = count()
    one_by_one = list(interleaved(10, 3, 1, groups))
    assert [group for group, _ in one_by_one] == [range(index, index + 1) for index in range(10)]
    assert all(sorted(order) == [0, 1, 2] for _, order in one_by_one)
    assert len({tuple(order) for _, order in one_by_one}) > 2
    # The next workload goes on; two in flight make groups of eight.
    assert [group for group, _ in interleaved(9, 2, 2, groups)] == [range(0, 8), range(8, 9)]
    assert next(groups) == 12


def test_configurations_have_plain_decoding_first_and_once() -> None:
    assert configurations(["dflash", "mtp"], [3, "auto"], {"dflash": "d"}) == (
        None,
        SpeculativeConfig("dflash", "d", 3),
        SpeculativeConfig("dflash", "d", "auto"),
        SpeculativeConfig("mtp", None, 3),
        SpeculativeConfig("mtp", None, "auto"),
    )
    assert configurations(["dflash", "none", "dflash"], [3, 3], {}) == (None, SpeculativeConfig("dflash", None, 3))
    assert configurations(["none"], [3], {}) == (None,)
    assert configurations(["mtp"], [3], {}, ["exact", "rejection"]) == (
        None,
        SpeculativeConfig("mtp", None, 3, "exact"),
        SpeculativeConfig("mtp", None, 3, "rejection"),
    )


def test_an_n_that_is_too_large_is_left_out_for_the_method_that_cannot(
    roomy: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"mtp": 15, "dflash": 5, "eagle3": 3}
    loaded: list[SpeculativeConfig] = []

    def load(config: SpeculativeConfig, _: Target) -> Oracle:
        loaded.append(config)
        oracle = Oracle([])
        oracle.max_tokens = most[config.method]
        return oracle

    monkeypatch.setattr(local, "load_drafter", load)
    wide = plan(*(SpeculativeConfig(method, None, n) for method in most for n in (4, 15, 20, "auto")))
    kept, notes = fitting(roomy, wide)
    assert [(each.method, each.num_speculative_tokens) for each in kept.configurations if each] == [
        *(("mtp", 4), ("mtp", 15), ("mtp", "auto")),
        *(("dflash", 4), ("dflash", "auto")),
        ("eagle3", "auto"),
    ]
    assert notes == (
        "mtp proposes at most 15 tokens: left out for it is N = 20",
        "dflash proposes at most 5 tokens: left out for it is N = 15, 20",
        "eagle3 proposes at most 3 tokens: left out for it is N = 4, 15, 20",
    )
    # Once a method, without an N that would be refused.
    assert loaded == [SpeculativeConfig(method) for method in most]
    assert kept.num_conversations == 7 * len(WORKLOAD.conversations)
    with pytest.raises(UserError, match="every N is more than the drafters propose; their most: mtp 15, dflash 5"):
        fitting(roomy, plan(*(SpeculativeConfig(method, None, 16) for method in ("mtp", "dflash"))))
    # One method alone is refused by its drafter, which knows its folder.
    alone = plan(SpeculativeConfig("mtp", None, 16), SpeculativeConfig("mtp", None, 3))
    assert fitting(roomy, alone) == (alone, ())


def test_a_drafter_is_measured_in_turns_with_plain_decoding(roomy: Target, drafter: str) -> None:
    told: list[str] = []
    planned = plan(
        SpeculativeConfig("dflash", drafter, 2), SpeculativeConfig("dflash", drafter, 4), concurrencies=(1, 2)
    )
    complete = list(measure(roomy, planned, told.append))
    assert len(told) == planned.num_conversations == 36
    assert [(runs[0].condition.concurrency, len(runs)) for runs in complete] == [(1, 3), (2, 3)]
    # One conversation of each in turn.
    ways = [words.rpartition(", ")[2] for words in told[:18]]
    for begin in range(0, 18, 3):
        assert sorted(ways[begin : begin + 3]) == ["dflash N=2", "dflash N=4", "none"]
    for runs in complete:
        for run, n in zip(runs, (0, 2, 4), strict=True):
            assert run.condition.num_speculative_tokens == n
            assert (run.num_prompts, run.turns) == (6, 9)
            assert run.identical_to_plain is True
            assert run.seconds > 0
            assert run.verify_ms is not None and run.verify_ms > 0
            assert run.draft_seconds is not None and run.verify_seconds is not None and run.observe_seconds is not None
            assert run.draft_seconds + run.verify_seconds + run.observe_seconds < run.seconds
            assert (run.observe_seconds > 0) == (n > 0)
            assert run.acceptance_rate_per_position is not None
            assert len(run.acceptance_rate_per_position) == n
        assert runs[0].speedup == 1.0
        assert runs[0].acceptance_length == 1.0
        assert runs[1].speedup == pytest.approx(runs[0].seconds / runs[1].seconds)


def test_answers_and_times_are_those_of_the_engine(roomy: Target) -> None:
    """Against a chat held by hand through the public interface."""
    llm = LLM(roomy)
    (talk,) = converse(LLM(roomy), WORKLOAD.conversations, [5], lambda *_: greedy(), 1, lambda: None)
    messages: list[dict[str, str]] = []
    for turn, answer in zip(WORKLOAD.conversations[5], talk.answers, strict=True):
        messages.append({"role": "user", "content": turn})
        output = llm.chat(messages, greedy())[0].outputs[0]
        messages.append({"role": "assistant", "content": output.text})
        assert answer.token_ids == tuple(output.token_ids)
        assert answer.num_tokens == len(output.token_ids)
        assert answer.ttft > 0
        assert (answer.decode_seconds > 0) == (answer.num_tokens > 1)


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_no_more_conversations_in_flight_than_asked(
    roomy: Target, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(roomy)
    step = llm.engine.step
    in_flight: list[int] = []

    def watched() -> Any:
        scheduler = llm.engine.scheduler
        in_flight.append(len(scheduler.waiting) + len(scheduler.running))
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    finished: list[None] = []
    talks = converse(
        llm, WORKLOAD.conversations, range(6), lambda *_: greedy(5), concurrency, lambda: finished.append(None)
    )
    assert [talk.number for talk in talks] == list(range(6))
    assert all(talk.finished for talk in talks)
    assert len(finished) == 6
    assert max(in_flight) == concurrency
    assert not llm.engine.has_work


def test_each_prompt_and_turn_has_a_seed_of_its_own_that_no_method_changes(roomy: Target, drafter: str) -> None:
    sampled = plan(SpeculativeConfig("dflash", drafter, 3), temperature=1.0, seed=7)
    _, drafted = next(measure(roomy, sampled, quiet))
    assert drafted.identical_to_plain is True
    seeds = {sampled.params("gsm8k")(prompt, turn).seed for prompt in range(6) for turn in range(3)}
    assert len(seeds) == 18
    first, again, other = (
        measure_workload([LLM(roomy)], WORKLOAD, plan(temperature=1.0, seed=seed), 1, count(), quiet)[0]
        for seed in (7, 7, 8)
    )
    assert find_differences(first, again) == []
    assert len(find_differences(first, other)) >= 5


def test_a_path_that_changes_the_output_is_caught(roomy: Target) -> None:
    """Another target's engine in the drafter's place stands for a speculation that is not exact."""
    planned = plan(SpeculativeConfig("dflash", None, 3))
    broken = LLM(tiny_target(seed=1, max_position_embeddings=ROOM))
    plain, other = measure_workload([LLM(roomy), broken], WORKLOAD, planned, 1, count(), quiet)
    condition = local._condition(roomy, planned, planned.configurations[1], WORKLOAD, 1)
    run = summarize(condition, other, plain)
    assert run.identical_to_plain is False
    assert run.num_different == 6
    first = {difference.prompt: difference for difference in run.differences or []}
    for number, turns in enumerate(WORKLOAD.conversations):
        outputs = [
            llm.chat([{"role": "user", "content": turns[0]}], greedy())[0].outputs[0].token_ids
            for llm in (LLM(roomy), broken)
        ]
        if outputs[0] != outputs[1]:
            assert (first[number].turn, first[number].token) == (0, first_difference(*outputs))


class Oracle:
    """Proposes what plain decoding is known to say, except that every third proposal goes wrong at its second."""

    taps: tuple[int, ...] = ()
    max_tokens = 8

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self.calls = 0

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        (request,) = requests
        self.calls += 1
        draft = list(self.text[request.position + 1 : request.position + 1 + max_tokens])
        if self.calls % 3 == 0 and len(draft) > 1:
            draft[1] = (draft[1] + 1) % CONFIG.vocab_size
        return [Proposal(tuple(draft))]

    def release(self, slot: int) -> None:
        pass


def test_acceptance_is_added_up_over_answers(roomy: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed form: N=3, 12 tokens an answer, one of them from the prompt: rounds commit 4, 4, then 2 and 1."""
    question = "cab"
    llm = LLM(roomy)
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answer = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids
    monkeypatch.setattr(local, "WARM_UP_TOKENS", 1)  # no round, so that the oracle's count begins with the answers
    monkeypatch.setattr(Plan, "params", lambda *_: lambda *_: params)
    oracle = Oracle([*prompt, *answer])
    monkeypatch.setattr("foredraft.llm.load_drafter", lambda *_: oracle)
    twice = Workload("gsm8k", "data-dir", ((question,), (question,)))
    _, run = next(measure(roomy, plan(SpeculativeConfig("dflash", "oracle", 3), workload=twice), quiet))
    assert run.identical_to_plain is True
    assert run.output_tokens == 24
    # The third round proposes two (room for three): one kept. In the fourth there is room for one: nothing proposed.
    assert run.rounds == 8
    assert run.acceptance_length == pytest.approx(22 / 8)
    assert run.acceptance_rate_per_position == pytest.approx([6 / 6, 4 / 6, 4 / 4])


def test_prompts_that_cannot_fit_are_named_before_anything_runs(target: Target) -> None:
    """The shared tiny target takes 48 tokens; 2 + 2 answers of up to 20 leave too little for this third turn."""
    with pytest.raises(UserError, match=r"prompt 6 of gsm8k can reach \d+ tokens, but tiny takes at most 48"):
        next(measure(target, plan(max_tokens=20), quiet))


def test_a_drafter_that_does_not_fit_stops_the_benchmark_at_once(roomy: Target, drafter: str) -> None:
    told: list[str] = []
    with pytest.raises(UserError, match=r"proposes 1 to 5 tokens"):
        next(measure(roomy, plan(SpeculativeConfig("dflash", drafter, 6)), told.append))
    assert told == []
