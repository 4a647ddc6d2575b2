"""Prometheus metrics, under vLLM's names and with vLLM's meaning where it has a counterpart."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from foredraft.engine.engine import Engine
from foredraft.engine.memory import Paged
from foredraft.engine.sequence import FinishReason, Sequence

disable_created_metrics()  # type: ignore[no-untyped-call]
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
LABELS = ("model_name", "engine")
REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


class Metrics:
    """What the engine's thread reports and a scrape reads. Every label has a fixed set of values."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self.refused = self._counter("vllm:admission_rejections", "Requests refused because the queue was full")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that started to answer")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Those of them that were not computed again")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token")
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "From one round of a sequence that brought tokens to its next"
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token")
        self._queued = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first pass")
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._answers = self._histogram("vllm:request_generation_tokens", "Tokens generated for a request", TOKENS)
        success = Counter(
            "vllm:request_success", "Sequences that ended", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._ended = {reason: success.labels(*self._labels, reason) for reason in REASONS}
        self._seen: dict[Sequence, float] = {}
        self._engine: Engine | None = None
        self.registry.register(self)

    def watch(self, engine: Engine) -> None:
        """Read this engine at every scrape."""
        self._engine = engine

    def progressed(self, sequence: Sequence, tokens: int, now: float) -> None:
        """A sequence got ``tokens`` new ones at ``now`` (``perf_counter``)."""
        before = self._seen.get(sequence)
        if before is None:
            self._prompt_tokens.inc(sequence.prompt_length)
            self._cached_tokens.inc(min(sequence.reused, sequence.prompt_length))
            self._queued.observe(max(0.0, sequence.admitted_at - sequence.arrived))
            self._first.observe(now - sequence.arrived)
        else:
            self._between.observe(now - before)
        self._seen[sequence] = now
        self._generation_tokens.inc(tokens)

    def finished(self, sequence: Sequence) -> None:
        self._seen.pop(sequence, None)
        self._ended[sequence.finish_reason or "abort"].inc()
        self._whole.observe(sequence.finished_at - sequence.arrived)
        self._prompts.observe(sequence.prompt_length)
        self._answers.observe(sequence.num_output)

    def text(self) -> bytes:
        """The exposition of all metrics."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What is read from the engine: prometheus_client's collector interface."""
        engine = self._engine
        if engine is None:
            return
        scheduler, counts = engine.scheduler, engine.speculation
        yield self._gauge("vllm:num_requests_running", "Sequences in passes", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for a place", len(scheduler.waiting))
        yield self._count("vllm:num_preemptions", "Sequences sent away for want of memory", scheduler.preemptions)
        memory = engine.memory
        if isinstance(memory, Paged):
            use = memory.use
            share = use.used / use.limit if use.limit else 0.0
            yield self._gauge("vllm:kv_cache_usage_perc", "Share of the pages that sequences own, 0 to 1", share)
            yield self._count("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", memory.queries)
            yield self._count("vllm:prefix_cache_hits", "Tokens found there", memory.hits)
        drafts = counts.proposed[0] if counts.proposed else 0
        yield self._count("vllm:spec_decode_num_drafts", "Proposals verified", drafts)
        yield self._count("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", sum(counts.proposed))
        yield self._count("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted", sum(counts.kept))
        kept = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted at each position of a proposal, from 0",
            labels=(*LABELS, "position"),
        )
        for position, count in enumerate(list(counts.kept)):
            kept.add_metric((*self._labels, str(position)), count)
        yield kept
        yield self._count("foredraft:rounds", "Rounds of decoding sequences, with a proposal or without", counts.rounds)
        admissions = CounterMetricFamily(
            "foredraft:admissions",
            "Sequences that got a place, by whether the drafter follows",
            labels=(*LABELS, "followed"),
        )
        for followed, count in scheduler.admissions.items():
            admissions.add_metric((*self._labels, str(followed).lower()), count)
        yield admissions
        yield self._count(
            "foredraft:catch_ups", "Sequences run anew with the drafter since the load allows it", scheduler.catch_ups
        )
        yield self._count("foredraft:drafted_tokens", "Draft tokens made, verified or not", engine.drafted_tokens)
        yield self._count(
            "foredraft:drafter_failures", "Errors of the drafter that requests survived", engine.drafter_failures
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(*self._labels)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
