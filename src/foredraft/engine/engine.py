"""The loop: schedule, propose, verify in one pass, accept, commit."""

import hashlib
import logging
from collections.abc import Callable
from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager, nullcontext, suppress
from time import perf_counter

import torch
from torch import Tensor

from foredraft.config import AcceptanceRule, EngineConfig, NumSpeculativeTokens
from foredraft.drafters.base import Drafter, DraftRequest, DraftSampling, Proposal, ReadsTargetCache
from foredraft.drafters.calibration import Round
from foredraft.engine import acceptance
from foredraft.engine.acceptance import Verdict
from foredraft.engine.budget import AutoBudget, Budget, FixedBudget
from foredraft.engine.costs import Costs, LiveCosts, measure
from foredraft.engine.grammar import Constraint, GrammarCompiler
from foredraft.engine.memory import Paged, Unlimited
from foredraft.engine.sampler import greedy_rows, is_plain_greedy, sample_rows, token_logprobs
from foredraft.engine.scheduler import Scheduler, Work
from foredraft.engine.sequence import Acceptance, RoundTrace, Sequence
from foredraft.engine.timings import Timings
from foredraft.errors import UserError
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.cache import PagedCache
from foredraft.models.decoder import DecoderModel
from foredraft.models.pages import PageTable
from foredraft.ops import NATIVE, native
from foredraft.ops.noise import NotFinite
from foredraft.sampling_params import SamplingParams
from foredraft.tokenizer import Tokenizer

LOG = logging.getLogger("foredraft")
NOTHING = Proposal(())


class Engine:
    """Runs sequences on a target, with a drafter or without.

    num_speculative_tokens: N, or auto, which measures costs first, and follows them, unless ``costs`` gives them.
    acceptance_rule: see ``SpeculativeConfig``. eos_token_ids: tokens that end a sequence; the tokenizer, when there is
    one, turns output into text.

    timings: where the time went. rounds: None; a list that somebody puts there gets one entry for each proposal.
    memory: of keys and values. speculation: counts over all sequences. drafted_tokens: draft tokens made, sent to
    verification or not. drafter_failures: how often the drafter raised, see ``EngineConfig.drafter_errors``.
    costs: as measured and followed, None where N is fixed.
    """

    def __init__(
        self,
        target: DecoderModel,
        config: EngineConfig,
        *,
        eos_token_ids: Ids[int] = (),
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        num_speculative_tokens: NumSpeculativeTokens = 0,
        acceptance_rule: AcceptanceRule = "exact",
        costs: Costs | None = None,
    ) -> None:
        own_limit = target.config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > own_limit:
            raise UserError(f"max_model_len is {config.max_model_len}, but the model's limit is {own_limit}")
        if drafter is not None and num_speculative_tokens != "auto" and num_speculative_tokens > drafter.max_tokens:
            raise UserError(
                f"num_speculative_tokens is {num_speculative_tokens}, "
                f"but this drafter proposes 1 to {drafter.max_tokens} tokens"
            )
        self._config = config
        self._target = target
        self._cache = target.new_cache()
        self._threads: Callable[[], AbstractContextManager[None]] = (
            native.alone if target.ops is NATIVE else nullcontext
        )
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer, target.config.vocab_size, eos_token_ids) if tokenizer else None
        self._drafter = drafter
        self._taps = drafter.taps if drafter else ()
        self._rule = acceptance_rule
        self._added = 0
        self._propose_seconds = self._ended = 0.0
        self.timings = Timings()
        self.rounds: list[Round] | None = None
        if isinstance(drafter, ReadsTargetCache):
            drafter.attach(self._cache)
        self.speculation = Acceptance()
        self.drafted_tokens = self.drafter_failures = 0
        most = 0 if drafter is None else drafter.max_tokens
        draft_tokens = most if num_speculative_tokens == "auto" else num_speculative_tokens
        self.max_model_len = config.max_model_len or own_limit
        self.memory, limit = self._make_memory(draft_tokens)
        self.scheduler = Scheduler(config, self.memory, draft_tokens, self._follows, self._catches_up)
        self._live: LiveCosts | None = None
        self._budget = self._make_budget(num_speculative_tokens, costs)
        if isinstance(self.memory, Paged):
            # What was measured is gone, so that the limit may be less than it took.
            self.memory.table.limit = limit

    def _make_memory(self, draft_tokens: int) -> tuple[Unlimited, int | None]:
        """The memory, and the most pages it may use. Lowers ``max_model_len`` to what they hold, unless it was asked
        for."""
        size, drafter = self._config.kv_cache_memory_bytes, self._drafter
        if size is None:
            return Unlimited([self._cache], drafter), None
        caches = [self._cache, *(drafter.caches if drafter else ())]
        paged = [cache for cache in caches if isinstance(cache, PagedCache)]
        if len(paged) < len(caches):
            raise UserError(
                "kv_cache_memory_bytes needs the native kernels (bfloat16 on the CPU); leave it out, and the cache "
                "grows as it needs"
            )
        page_bytes = sum(cache.page_bytes for cache in paged)
        limit = size // page_bytes
        table = PageTable(paged[0].table.positions)
        longest = limit * table.positions - draft_tokens
        if longest < min(self.max_model_len, self._config.max_model_len or 2):
            needed = table.count(self.max_model_len + draft_tokens) * page_bytes
            raise UserError(
                f"kv_cache_memory_bytes is {size}, but one sequence of {self.max_model_len} tokens takes {needed} "
                "bytes; give it more, or lower max_model_len"
            )
        self.max_model_len = min(self.max_model_len, longest)
        return Paged(paged, drafter, table, self._config.enable_prefix_caching), limit

    def _make_budget(self, num_speculative_tokens: NumSpeculativeTokens, costs: Costs | None) -> Budget:
        if self._drafter is None:
            return FixedBudget(0)
        if num_speculative_tokens != "auto":
            return FixedBudget(num_speculative_tokens)
        most = self._drafter.max_tokens
        if costs is None:
            with torch.inference_mode(), self._threads():
                measured = measure(
                    self._target, self._cache, self._drafter, self.max_model_len, self._config.max_num_seqs, most
                )
            costs = self._live = LiveCosts(measured)
        return AutoBudget(costs, most, self._rule == "exact", self._config.prefill_beside_decode)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def costs(self) -> Costs | None:
        return self._live

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar that ``params`` ask for, so that ``add`` finds it; other threads may do this while the
        engine runs. Raises UserError if it cannot be used."""
        self._constraint(params)

    def add(self, prompt: Ids[int], params: SamplingParams) -> list[Sequence]:
        """Queue a prompt; one sequence for each of ``params.n`` samples. Raises UserError if it cannot run."""
        vocab_size = self._target.config.vocab_size
        if not prompt:
            raise UserError("the prompt is empty; it must have at least one token")
        if len(prompt) >= self.max_model_len:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but this model takes at most {self.max_model_len} "
                "tokens, prompt and answer together; shorten the prompt"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(f"the prompt has a token id outside the vocabulary, 0 to {vocab_size - 1}")
        params.check_vocabulary(vocab_size)
        constraints = [self._constraint(params) for _ in range(params.n)]
        base = params.seed if params.seed is not None else _derived(self._config.seed, self._added)
        self._added += 1
        sequences = [
            Sequence(
                prompt,
                params,
                base if index == 0 else _derived(base, index),
                self.max_model_len,
                self._eos_token_ids,
                self._tokenizer,
            )
            for index in range(params.n)
        ]
        for sequence, constraint in zip(sequences, constraints, strict=True):
            sequence.constraint = constraint
            self.scheduler.add(sequence)
        return sequences

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise UserError("structured_outputs needs the model's tokenizer, and this engine has none")
        return self._grammars.constraint(params.structured_outputs)

    def abort(self, sequence: Sequence) -> None:
        """Stop a sequence, unless it has finished, and make its place free; what it has so far stays."""
        if not sequence.finished:
            sequence.finish("abort")
        # One that has finished still has a place where its pass then failed.
        self._retire(sequence)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One pass of the target. Returns the sequences that got new tokens."""
        with self._threads():
            begin, live = perf_counter(), self._live
            work = self.scheduler.schedule()
            if not work:
                return []
            decoding = all(item.sequence.decoding for item in work)
            observed, drafting = self.timings.seconds["observe"], self._propose_seconds
            moved = self._run(work)
            end = perf_counter()
            if live and decoding:
                drafting = self._propose_seconds - drafting
                observed = self.timings.seconds["observe"] - observed
                verified = self.timings.last["verify"]
                # What the caller does between two rounds is part of a round, unless it paused.
                between = min(begin - self._ended, verified) if self._ended else 0.0
                live.rested(len(work), between + end - begin - drafting - verified - observed)
            self._ended = end if self.has_work else 0.0
            return moved

    def _run(self, work: Ids[Work]) -> list[Sequence]:
        with self.timings.measure("draft"):
            proposals = self._propose(work)
        followed = any(item.sequence.followed for item in work)
        with self.timings.measure("verify"):
            batch = flat_batch(
                [item.tokens + list(draft.token_ids) for item, draft in zip(work, proposals, strict=True)],
                [item.sequence.computed for item in work],
                [item.sequence.slot for item in work],
                _logit_counts(work, proposals),
                self._target.device,
            )
            output = self._target.forward(batch, self._cache, self._taps if followed else ())
            verdicts = self._judge(work, proposals, output.logits)
        if self._live:
            self._live.verified(sum(batch.counts), self.timings.last["verify"])
        kept = [
            self._commit(item, draft, verdict) for item, draft, verdict in zip(work, proposals, verdicts, strict=True)
        ]
        if self._drafter and followed:
            self._observe(work, batch, output.taps, kept)
        for item in work:
            if item.sequence.finished:
                self._retire(item.sequence)
            else:
                self.memory.computed(item.sequence)
        return [
            item.sequence for item, verdict in zip(work, verdicts, strict=True) if verdict or item.sequence.finished
        ]

    def _propose(self, work: Ids[Work]) -> list[Proposal]:
        """What each item sends to verification, nothing where it does not decode."""
        proposals = [NOTHING] * len(work)
        planned = self._budget.plan(work)
        if not planned or self._drafter is None:
            return proposals
        requests = [self._request(work[index].sequence) for index in planned]
        begin = perf_counter()
        try:
            proposed = self._drafter.propose(requests, max(planned.values()), self._budget.stop)
        except Exception as error:
            self._without_drafter(error, [work[index].sequence for index in planned])
            return proposals
        lengths = [len(proposal.token_ids) for proposal in proposed]
        self.drafted_tokens += sum(lengths)
        seconds = perf_counter() - begin
        self._propose_seconds += seconds
        if self._live and any(lengths):
            self._live.drafted(lengths, seconds)
        for (index, limit), proposal in zip(planned.items(), proposed, strict=True):
            proposals[index] = _allowed(work[index].sequence, proposal.first(limit))
        return self._budget.trim(work, proposals)

    def _observe(self, work: Ids[Work], batch: Batch, taps: Tensor | None, kept: Ids[int]) -> None:
        assert self._drafter is not None
        # What never drafts need not be followed.
        followed = [count if item.sequence.followed else 0 for item, count in zip(work, kept, strict=True)]
        if not any(followed):
            return
        with self.timings.measure("observe"):
            try:
                self._drafter.observe(batch, taps, followed)
            except Exception as error:
                self._without_drafter(error, [item.sequence for item in work if not item.sequence.finished])

    def _without_drafter(self, error: Exception, sequences: Ids[Sequence]) -> None:
        """What the drafter knows of these sequences is lost: raise on, or let them do without it."""
        if self._config.drafter_errors == "raise":
            raise error
        self.drafter_failures += 1
        LOG.error("the drafter failed; %d sequences go on without speculation", len(sequences), exc_info=error)
        for sequence in sequences:
            sequence.draft_limit, sequence.followed = 0, False

    def _follows(self, sequence: Sequence, load: int) -> bool:
        return sequence.draft_limit > 0 and self._budget.follows(load)

    def _catches_up(self, sequence: Sequence, load: int) -> bool:
        return sequence.draft_limit > 0 and self._budget.catches_up(sequence, load)

    def _request(self, sequence: Sequence) -> DraftRequest:
        sampling = None
        if not sequence.params.greedy:
            sampling = DraftSampling(sequence.params.temperature, sequence.seed, self._rule == "rejection")
        return DraftRequest(sequence.slot, sequence.tokens[-1], sequence.computed, sampling)

    def _judge(self, work: Ids[Work], proposals: Ids[Proposal], logits: Tensor) -> list[Verdict | None]:
        """What the target makes of each proposal; None where no token is due yet."""
        counts = _logit_counts(work, proposals)
        rows = torch.split(logits, counts)
        due = [item for item in work if item.reaches_end]
        greedy: list[int] = []
        if due and all(is_plain_greedy(item.sequence.params) for item in due):
            # Where one has none to choose, the others have nothing to do with it: then row by row.
            with suppress(NotFinite):
                greedy = greedy_rows(logits)
        verdicts: list[Verdict | None] = []
        first = 0
        for item, draft, count, own in zip(work, proposals, counts, rows, strict=True):
            if not count:
                verdicts.append(None)
                continue
            try:
                if greedy:
                    verdict = acceptance.exact(draft.token_ids, greedy[first : first + count])
                else:
                    verdict = self._verdict(item.sequence, draft, own)
                self._report_logprobs(item.sequence, draft, verdict, own)
            except NotFinite as error:
                item.sequence.fail(str(error))
                verdict = None
            verdicts.append(verdict)
            first += count
        return verdicts

    def _verdict(self, sequence: Sequence, draft: Proposal, logits: Tensor) -> Verdict:
        position = len(sequence.tokens) - 1
        arguments = (logits, sequence.params, sequence.history, draft.token_ids)
        if self._rule == "rejection" and draft.token_ids:
            return acceptance.rejection_rows(
                *arguments, draft.log_probs, position, sequence.seed, sequence.stop_ids, sequence.constraint
            )
        sampled = sample_rows(*arguments, position, sequence.seed, sequence.stop_ids, sequence.constraint)
        return acceptance.exact(draft.token_ids, sampled)

    def _report_logprobs(self, sequence: Sequence, draft: Proposal, verdict: Verdict, logits: Tensor) -> None:
        if sequence.params.logprobs is not None:
            tokens = [*draft.token_ids[: verdict.accepted], verdict.token]
            sequence.logprobs.extend(token_logprobs(logits, tokens, sequence.params.logprobs))

    def _commit(self, item: Work, draft: Proposal, verdict: Verdict | None) -> int:
        """Append what was accepted; returns how many of the item's rows stay in the caches."""
        sequence = item.sequence
        if sequence.finished:
            return 0
        kept = item.count
        if verdict is not None:
            drafted = sequence.decoding
            tokens = [*draft.token_ids[: verdict.accepted], verdict.token]
            committed = sequence.append(tokens, verdict.accepted)
            del sequence.logprobs[sequence.num_output :]
            accepted = min(verdict.accepted, committed)
            if sequence.rounds is not None:
                sequence.rounds.append(RoundTrace(committed, accepted, draft.token_ids))
            if drafted:
                for counts in (sequence.acceptance, self.speculation):
                    counts.record(len(draft.token_ids), accepted, committed)
                self._learn(sequence, draft, verdict.accepted)
            if sequence.finished:
                return 0
            kept += accepted
        sequence.computed += kept
        self._cache.commit(sequence.slot, sequence.computed)
        return kept

    def _learn(self, sequence: Sequence, draft: Proposal, accepted: int) -> None:
        self._budget.record(sequence, accepted)
        if self.rounds is not None and draft.confidences:
            self.rounds.append(Round(draft.confidences, accepted))

    def _retire(self, sequence: Sequence) -> None:
        if self.scheduler.remove(sequence):
            self._budget.forget(sequence)


def _allowed(sequence: Sequence, proposal: Proposal) -> Proposal:
    """The proposal cut where the sequence's grammar forbids a token.

    One that was drawn at random stays, to be rejected: the token in its place comes from max(p - q, 0), not from p.
    """
    if sequence.constraint is None:
        return proposal
    drawn = proposal.log_probs is not None
    return proposal.first(sequence.constraint.valid_prefix(proposal.token_ids) + drawn)


def _logit_counts(work: Ids[Work], proposals: Ids[Proposal]) -> list[int]:
    """How many rows of logits each item needs: one, and one for each draft token, once its end is reached."""
    return [1 + len(draft.token_ids) if item.reaches_end else 0 for item, draft in zip(work, proposals, strict=True)]


def _derived(seed: int, index: int) -> int:
    """A seed of its own for the ``index``-th request or sample, in the range of SamplingParams.seed."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
