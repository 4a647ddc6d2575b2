"""How many proposed tokens a sequence sends to verification."""

from foredraft.engine.sequence import Sequence


def draft_room(sequence: Sequence, num_speculative_tokens: int) -> int:
    """The most draft tokens that can be of use: a round commits one more than it keeps, and the output, which
    ``max_tokens`` and the context length bound, has room for ``sequence.room`` tokens."""
    return max(0, min(num_speculative_tokens, sequence.room - 1))
