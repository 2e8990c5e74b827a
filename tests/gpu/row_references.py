"""What the row-wise kernels are compared with: random rows, torch with the reference decoder's rounding, closeness."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.engine.cuda.kernels import E4M3_MAX, Kernels
from baton.engine.spec import DecoderSpec, RopeSpec

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
ROWS = [1, 3, 64, 257, 8192]
EPS = 1e-5


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(BF16)


def poison(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """NaN everywhere (e4m3's is 0x7f): what a kernel leaves unwritten shows."""
    if dtype == E4M3:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(E4M3)
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def ints(values: list[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many bf16 numbers apart a and b are."""
    assert not a.isnan().any()
    assert not b.isnan().any()
    ordered = [x.contiguous().view(torch.int16).to(torch.int32) for x in (a, b)]
    low, high = (torch.where(x < 0, -(x & 0x7FFF), x) for x in ordered)
    return (low - high).abs()


def assert_nearly_all_equal(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Each of two roundings may fall to the other side where float32's last bits differ: seldom, and by little."""
    apart = ulps(out, expected)
    assert int(apart.max()) <= 2
    assert float((apart > 0).float().mean()) < 2e-3


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm in float64 with bf16's two roundings."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)).to(BF16) * weight


def as_e4m3(x: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    return (x.float() * factor).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def row_maxima(x: torch.Tensor) -> torch.Tensor:
    """float32 [rows, 1]."""
    return x.float().abs().amax(dim=-1, keepdim=True)


def quotient(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """a / b, rounded once: torch multiplies by the reciprocal of a plain number."""
    wide = [torch.as_tensor(x, dtype=torch.float32, device=DEVICE) for x in (a, b)]
    return torch.div(*torch.broadcast_tensors(*wide))


LLAMA_8B = DecoderSpec("llama", 1000, 4096, 4096, 14_336, 3, 32, 8, 128, EPS, RopeSpec(5e5), tied_head=False)
QWEN3 = replace(LLAMA_8B, hidden_size=1024, ffn_size=3072, heads=16, qk_norm=True)
SMOLLM2 = replace(LLAMA_8B, hidden_size=576, ffn_size=1536, heads=9, kv_heads=3, head_dim=64)
TINY = replace(LLAMA_8B, hidden_size=192, heads=3, kv_heads=1, head_dim=64, qk_norm=True)
HEADS_OF_96 = replace(LLAMA_8B, heads=8, kv_heads=2, head_dim=96, qk_norm=True)
HEADS_OF_256 = replace(LLAMA_8B, heads=5, kv_heads=1, head_dim=256, qk_norm=True)
HEADS_OF_32 = replace(LLAMA_8B, heads=4, kv_heads=2, head_dim=32)
SPECS = [LLAMA_8B, QWEN3, SMOLLM2, TINY, HEADS_OF_96, HEADS_OF_256, HEADS_OF_32]


@dataclass(frozen=True)
class RopeStep:
    """Random rows for one layer, every fifth a padding row, in slots that differ."""

    spec: DecoderSpec
    qkv: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    layer: int
    blocks: int
    block_size: int

    @classmethod
    def random(cls, spec: DecoderSpec, rows: int, block_size: int) -> RopeStep:
        generator = torch.Generator().manual_seed(rows)
        blocks = rows // block_size + 5
        slots = torch.randperm(blocks * block_size, generator=generator)[:rows]
        slots[4::5] = -1
        angles = torch.rand(spec.context_length, spec.head_dim // 2, generator=generator).to(DEVICE) * 6.3
        norms = [normal(spec.head_dim, seed=seed) if spec.qk_norm else None for seed in (3, 4)]
        return cls(
            spec=spec,
            qkv=normal(rows, spec.q_size + 2 * spec.kv_size, scale=2.0),
            positions=ints(torch.randint(spec.context_length, (rows,), generator=generator)),
            slots=ints(slots),
            cos=angles.cos(),
            sin=angles.sin(),
            q_norm=norms[0],
            k_norm=norms[1],
            layer=1,
            blocks=blocks,
            block_size=block_size,
        )

    def pool(self, dtype: torch.dtype) -> torch.Tensor:
        spec = self.spec
        return poison(self.blocks, spec.layers, 2, spec.kv_heads, self.block_size, spec.head_dim, dtype=dtype)

    def append(self, kernels: Kernels, qkv: torch.Tensor, pool: torch.Tensor) -> None:
        inputs = (self.positions, self.slots, self.cos, self.sin, self.spec, self.q_norm, self.k_norm)
        kernels.rope_append(qkv, *inputs, pool, self.layer)

    def kept(self) -> torch.Tensor:
        """bool [rows]: which are not padding."""
        return self.slots >= 0

    def expected(self, part: str) -> torch.Tensor:
        """q, k or v of all rows, bf16 [rows, heads, head_dim]."""
        spec = self.spec
        q, k, v = self.qkv.split([spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
        x, norm = {"q": (q, self.q_norm), "k": (k, self.k_norm), "v": (v, None)}[part]
        x = x.unflatten(-1, (-1, spec.head_dim))
        if part == "v":
            return x
        x = x if norm is None else normed(x, norm)
        low, high = x.float().chunk(2, dim=-1)
        cos, sin = (table[self.positions.long()][:, None, :] for table in (self.cos, self.sin))
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(BF16)

    def cached(self, pool: torch.Tensor, side: int) -> torch.Tensor:
        """What the pool has for the kept rows, [kept, kv_heads, head_dim]."""
        slots = self.slots[self.kept()].long()
        return pool[slots // self.block_size, self.layer, side, :, slots % self.block_size]
