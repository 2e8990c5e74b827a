"""Counter-based randomness: the number for (seed, position) does not depend on what was drawn before.

Philox 4x32 with 10 rounds, after Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11). A resumed,
re-batched or speculated request therefore draws the same tokens.
"""

from __future__ import annotations

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a 128-bit counter under a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A double in [0, 1) with 53 random bits for output position ``position`` under the 64-bit ``seed``."""
    words = philox((position & _MASK, position >> 32, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return ((words[0] << 21) | (words[1] >> 11)) * 2.0**-53
