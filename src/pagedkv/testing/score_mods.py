"""Functions of a score for `score_mod`, as a user would write them."""

import math

__all__ = ["fade", "own_parity"]


def fade(score, q_pos, k_pos, head, seq):
    """Older keys count less, by an amount of each head's own."""
    return score - 0.01 * (head + 1) * (q_pos - k_pos)


def own_parity(score, q_pos, k_pos, head, seq):
    """Odd heads see odd keys: of a sequence of one token, none."""
    return -math.inf if k_pos % 2 != head % 2 else score
