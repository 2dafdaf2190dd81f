"""The CPU extension's kernels on torch tensors: shapes and strides are checked here, then only addresses travel.

Same functions and meanings as :mod:`vllm_clone.kernels.reference`. Wrong shapes, strides and dtypes raise ValueError;
the values of positions, slots, block ids and lengths are trusted.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch

import vllm_clone.kernels.cpu._C as _C
from vllm_clone import envs
from vllm_clone.hub.gguf import BLOCK_SIZES, GGMLType
from vllm_clone.kernels.arena import Arena
from vllm_clone.kernels.cpu.checks import require as _require
from vllm_clone.kernels.cpu.sampling import add_at_ as add_at_
from vllm_clone.kernels.cpu.sampling import apply_bitmask_ as apply_bitmask_
from vllm_clone.kernels.cpu.sampling import keep_only_ as keep_only_
from vllm_clone.kernels.cpu.sampling import mask_at_ as mask_at_
from vllm_clone.kernels.cpu.sampling import penalise_ as penalise_
from vllm_clone.kernels.cpu.sampling import sample_tokens as sample_tokens
from vllm_clone.kernels.cpu.sampling import score_tokens as score_tokens
from vllm_clone.kernels.gguf_matrix import GGUFMatrix
from vllm_clone.kernels.reference import SCALE_BYTES, Rotary
from vllm_clone.logger import init_logger
from vllm_clone.platforms.cpu import num_usable_cores

logger = init_logger(__name__)


class _Codes(dict[Any, int]):
    """What the extension calls a thing; an unknown thing is a ValueError."""

    def __missing__(self, key: Any) -> NoReturn:
        raise ValueError(f"{key} is none of {', '.join(map(str, self))}")


_DTYPES = _Codes({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
_KV_TYPES = _Codes({**_DTYPES, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, torch.int8: 5})
_SILU, _GELU, _GELU_TANH, _RELU = 0, 1, 2, 3
_GELU_KINDS = _Codes({"none": _GELU, "tanh": _GELU_TANH})
MAX_HEAD_SIZE = 512

DEQUANTIZABLE = frozenset(
    [
        *(GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1),
        *(GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K),
    ]
)
"""GGUF storage types :func:`dequantize_gguf` knows."""


def configure() -> None:
    """Choose the instruction set level and the number of threads from the environment."""
    level = envs.VLLM_CPU_ISA
    if level:
        _C.use(level)
    elif amx_state() not in ("", "ready"):
        logger.warning("The processor's AMX tiles: %s. The %s kernels are used.", amx_state(), active_level())
    _C.set_num_threads(envs.VLLM_CPU_THREADS or num_usable_cores())


def active_level() -> str:
    """Instruction set level in use, such as ``avx512_bf16``."""
    return str(_C.active())


def available_levels() -> list[str]:
    """Instruction set levels this machine has, best first."""
    return list(_C.available())


def emulated_levels() -> list[str]:
    """Levels for tests, whose kernels use emulated matrix tiles: chosen by name only."""
    return list(_C.emulated())


def amx_state() -> str:
    """Whether the processor's matrix tiles are used: "ready" or why not; empty when it has none."""
    return str(_C.amx_state())


def use_level(name: str) -> None:
    """Switch to one of the available or emulated levels."""
    _C.use(name)


def set_num_threads(count: int) -> None:
    """Number of threads all kernels use, the calling one included."""
    _C.set_num_threads(count)


def set_thread_cores(cores: list[int]) -> None:
    """Keep the i-th thread of the pool on core ``cores[i % len(cores)]``; [] lets all run where they like.

    The calling thread is the pool's first and stays as it is: a thread it starts later inherits its cores.
    """
    _C.set_thread_cores(cores)


_arena: Arena | None = None
"""Where outputs are allocated while calls are recorded; elsewhere they come from torch."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised contiguous memory for a kernel's output; all intermediates of a forward pass come from here."""
    return torch.empty(shape, dtype=dtype) if _arena is None else _arena.empty(shape, dtype)


_weights = Arena()
"""Where the matrices of a model stand, one after the other."""


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor for numbers that every step reads: 64-byte aligned, in huge pages if there are any."""
    return _weights.empty(shape, dtype)


class Tape:
    """Kernel calls of one forward pass, recorded once and run many times without Python.

    The CPU's counterpart of a CUDA graph. Addresses and shapes are kept as recorded, except for the number of rows,
    of which each call remembers a multiple: a tape runs any batch up to the recorded size. What torch computes by
    itself is not recorded.
    """

    def __init__(self, max_tokens: int, max_requests: int, arena: Arena) -> None:
        """A tape for the calls of a batch of this size; tapes that never run at the same time may share an arena."""
        self._tape = _C.Tape(max_tokens, max_requests)
        self._arena = arena

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record this thread's kernel calls instead of running them."""
        global _arena
        _arena = self._arena
        self._tape.start()
        try:
            yield
        finally:
            self._tape.stop()
            _arena = None

    def run(self, num_tokens: int, num_requests: int) -> None:
        """Run the calls on what is in the recorded memory now."""
        self._tape.run(num_tokens, num_requests)

    def __len__(self) -> int:
        return len(self._tape)


def _norm_facts(x_TD: torch.Tensor, weight_D: torch.Tensor) -> tuple[int, int, int]:
    """Size of the axis to normalise, and what the dtypes of the weight and of x are called."""
    dim = weight_D.shape[0]
    _require(x_TD.shape[-1] == dim > 0, "norm: x and weight must agree")
    _require(x_TD.dtype in (weight_D.dtype, torch.float32), "norm: x must be float32 or of the weight's dtype")
    _require(weight_D.dim() == 1 and weight_D.is_contiguous(), "norm: the weight must be one contiguous row")
    return dim, _DTYPES[weight_D.dtype], _DTYPES[x_TD.dtype]


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, weight_offset: float = 0.0) -> torch.Tensor:
    dim, dtype, stream = _norm_facts(x_TD, weight_D)
    rows = x_TD if x_TD.dim() == 2 and x_TD.stride(1) == 1 else x_TD.contiguous().view(-1, dim)
    out = empty(tuple(x_TD.shape), weight_D.dtype)
    _C.rms_norm(
        dtype, stream, out.data_ptr(), rows.data_ptr(), 0, weight_D.data_ptr(), rows.shape[0], 1, dim,
        rows.stride(0), dim, eps, weight_offset,
    )  # fmt: skip
    return out


def rms_norm_heads_(x_T_HD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, weight_offset: float = 0.0) -> None:
    dim = weight_D.shape[0]
    _require(x_T_HD.dim() == 2 and x_T_HD.stride(1) == 1, "rms_norm_heads_: rows of heads expected")
    heads, rest = divmod(x_T_HD.shape[1], dim)
    _require(rest == 0 and x_T_HD.dtype == weight_D.dtype, "rms_norm_heads_: rows must be whole heads")
    dtype, x, stride = _DTYPES[x_T_HD.dtype], x_T_HD.data_ptr(), x_T_HD.stride(0)
    _C.rms_norm(
        dtype, dtype, x, x, 0, weight_D.data_ptr(), x_T_HD.shape[0], heads, dim, stride, stride, eps, weight_offset
    )


def fused_add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, weight_offset: float = 0.0
) -> None:
    dim, dtype, stream = _norm_facts(residual_TD, weight_D)
    _require(
        x_TD.shape == residual_TD.shape and x_TD.dtype == weight_D.dtype,
        "fused_add_rms_norm: shapes must agree",
    )
    _require(
        x_TD.is_contiguous() and residual_TD.is_contiguous(), "fused_add_rms_norm: works in place on contiguous rows"
    )
    x = x_TD.data_ptr()
    _C.rms_norm(
        dtype, stream, x, x, residual_TD.data_ptr(), weight_D.data_ptr(), x_TD.numel() // dim, 1, dim, dim, dim,
        eps, weight_offset,
    )  # fmt: skip


def layer_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    dim, dtype, stream = _norm_facts(x_TD, weight_D)
    if bias_D is not None:
        _require(bias_D.shape == weight_D.shape and bias_D.dtype == weight_D.dtype, "norm: bias and weight must agree")
        _require(bias_D.is_contiguous(), "norm: the bias must be contiguous")
    x = x_TD.contiguous()
    out = empty(tuple(x.shape), weight_D.dtype)
    bias = 0 if bias_D is None else bias_D.data_ptr()
    _C.layer_norm(dtype, stream, out.data_ptr(), x.data_ptr(), weight_D.data_ptr(), bias, x.numel() // dim, dim, eps)
    return out


def _check_rotary(positions_T: torch.Tensor, cos_sin_PR: torch.Tensor, head_size: int) -> None:
    _require(
        positions_T.dtype == torch.int64 and cos_sin_PR.dtype == torch.float32, "rotary: int64 and float32 expected"
    )
    rotary_dim = cos_sin_PR.shape[1]
    _require(rotary_dim <= head_size and rotary_dim % 2 == 0, "rotary: the table must be even and within a head")
    _require(cos_sin_PR.is_contiguous() and positions_T.is_contiguous(), "rotary: table, positions must be contiguous")


def rotary_embedding_(
    positions_T: torch.Tensor,
    q_T_HD: torch.Tensor,
    k_T_KD: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    head_size: int,
    is_neox: bool,
) -> None:
    _check_rotary(positions_T, cos_sin_PR, head_size)
    rotary_dim = cos_sin_PR.shape[1]
    for x in (q_T_HD, k_T_KD):
        heads, rest = divmod(math.prod(x.shape[1:]), head_size)
        _require(heads > 0 and rest == 0 and x.dim() in (2, 3), "rotary: rows must be whole heads")
        _require(x.shape[0] == positions_T.shape[0], "rotary: one position per token")
        packed = x.dim() == 2 or (x.shape[2] == head_size and (heads == 1 or x.stride(1) == head_size))
        _require(x.stride(-1) == 1 and packed, "rotary: heads must be contiguous")
        _C.rotary(
            _DTYPES[x.dtype], x.data_ptr(), positions_T.data_ptr(), cos_sin_PR.data_ptr(), x.shape[0], heads,
            x.stride(0), head_size, rotary_dim, is_neox,
        )  # fmt: skip


def _activation(x: torch.Tensor, kind: int, gated: bool) -> torch.Tensor:
    x = x.contiguous()
    dim, rest = divmod(x.shape[-1], 2) if gated else (x.shape[-1], 0)
    _require(dim > 0 and rest == 0, "activation: gate and up halves expected")
    out = empty((*x.shape[:-1], dim), x.dtype)
    _C.activation(_DTYPES[x.dtype], out.data_ptr(), x.data_ptr(), math.prod(x.shape[:-1]), dim, kind, gated)
    return out


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    return _activation(x_T2F, _SILU, True)


def gelu_and_mul(x_T2F: torch.Tensor, *, approximate: str) -> torch.Tensor:
    return _activation(x_T2F, _GELU_KINDS[approximate], True)


def gelu(x_TF: torch.Tensor, *, approximate: str) -> torch.Tensor:
    return _activation(x_TF, _GELU_KINDS[approximate], False)


def silu(x_TF: torch.Tensor) -> torch.Tensor:
    return _activation(x_TF, _SILU, False)


def relu(x_TF: torch.Tensor) -> torch.Tensor:
    return _activation(x_TF, _RELU, False)


def _rows_of(x: torch.Tensor) -> tuple[int, int]:
    """Rows and width of contiguous memory."""
    _require(x.is_contiguous() and x.dim() > 0, "contiguous rows expected")
    return math.prod(x.shape[:-1]), x.shape[-1]


def scale_(x_TD: torch.Tensor, factor: float) -> None:
    dtype = _DTYPES[x_TD.dtype]
    _C.scale_add(dtype, dtype, x_TD.data_ptr(), 0, *_rows_of(x_TD), factor, 0.0)


def add_(x_TD: torch.Tensor, y_TD: torch.Tensor) -> None:
    _require(x_TD.shape == y_TD.shape and y_TD.is_contiguous(), "add_: x and y must agree")
    _require(x_TD.dtype in (y_TD.dtype, torch.float32), "add_: x must be float32 or of y's dtype")
    dtypes = _DTYPES[x_TD.dtype], _DTYPES[y_TD.dtype]
    _C.scale_add(*dtypes, x_TD.data_ptr(), y_TD.data_ptr(), *_rows_of(x_TD), 1.0, 1.0)


def embedding(matrix_NK: torch.Tensor, rows_T: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    _require(matrix_NK.dim() == 2 and matrix_NK.is_contiguous(), "embedding: a contiguous matrix expected")
    return _matrix_rows(matrix_NK, matrix_NK.shape[1], rows_T, dtype, False)


def _matrix_rows(
    matrix: torch.Tensor, k: int, rows_T: torch.Tensor, dtype: torch.dtype | None, packed: bool
) -> torch.Tensor:
    _require(rows_T.dtype == torch.int64 and rows_T.is_contiguous(), "embedding: contiguous int64 rows expected")
    _require(dtype in (None, matrix.dtype, torch.float32), "embedding: float32 or the matrix's dtype expected")
    out = empty((rows_T.numel(), k), dtype or matrix.dtype)
    _C.linear_rows(
        _DTYPES[matrix.dtype], _DTYPES[out.dtype], packed, out.data_ptr(), matrix.data_ptr(), rows_T.data_ptr(),
        rows_T.numel(), k,
    )  # fmt: skip
    return out


def _page_facts(kv_cache: torch.Tensor, size: int) -> tuple[int, bool]:
    """What the elements of a cache are called, and whether pages keep a scale per token and head."""
    _require(kv_cache.dim() == 5 and kv_cache.is_contiguous(), "cache: contiguous [blocks, 2, K, block, D] expected")
    _, pair, heads, block_size, width = kv_cache.shape
    scaled = kv_cache.element_size() == 1 and width == size + SCALE_BYTES
    _require(pair == 2 and heads > 0 and (width == size or scaled), "cache: wrong shape")
    _require(block_size > 0 and block_size % 2 == 0, "cache: blocks must hold an even number of tokens")
    _require(size % 2 == 0 and size <= MAX_HEAD_SIZE, f"cache: head sizes are even, up to {MAX_HEAD_SIZE}")
    _require(scaled or kv_cache.dtype != torch.int8, "cache: int8 needs scales")
    return _KV_TYPES[kv_cache.dtype], scaled


def _new_tokens(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
) -> tuple[int, int, int, int, int]:
    """Addresses of keys, values and slots, and distances of rows."""
    _require(k_TKD.dim() == 3 and k_TKD.shape == v_TKD.shape, "cache: keys and values must agree")
    tokens, heads, size = k_TKD.shape
    _require(kv_cache.shape[2] == heads, "cache: wrong shape")
    _require(k_TKD.dtype == v_TKD.dtype, "cache: keys and values must share a dtype")
    _require(k_TKD.stride()[1:] == v_TKD.stride()[1:] == (size, 1), "cache: heads must be contiguous")
    _require(
        slot_mapping_T.dtype == torch.int64
        and slot_mapping_T.shape == (tokens,)
        and (tokens < 2 or slot_mapping_T.stride(0) == 1),
        "cache: one int64 slot per token",
    )
    return k_TKD.data_ptr(), v_TKD.data_ptr(), slot_mapping_T.data_ptr(), k_TKD.stride(0), v_TKD.stride(0)


_NO_TOKENS = (0, 0, 0, 0, 0)
_NO_ROTARY = (0, 0, 0, False)


def reshape_and_cache(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
) -> None:
    key, value, slots, key_stride, value_stride = _new_tokens(k_TKD, v_TKD, kv_cache, slot_mapping_T)
    tokens, heads, size = k_TKD.shape
    kind, scaled = _page_facts(kv_cache, size)
    _C.write_cache(
        _DTYPES[k_TKD.dtype], kind, scaled, kv_cache.data_ptr(), key, value, slots, tokens, key_stride, value_stride,
        heads, size, kv_cache.shape[3],
    )  # fmt: skip


def paged_attention(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    out_THD: torch.Tensor,
) -> None:
    _attend(
        q_THD, kv_cache, block_table_RB, query_start_loc_R1, seq_lens_R, scale, sliding_window, softcap, out_THD,
        _NO_TOKENS, _NO_ROTARY,
    )  # fmt: skip


def fused_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    block_table_RB: torch.Tensor,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    *,
    rotary: Rotary | None,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    out_THD: torch.Tensor,
) -> None:
    _require(q_THD.dtype == k_TKD.dtype and q_THD.shape[0] == k_TKD.shape[0], "attention: queries and keys disagree")
    new = _new_tokens(k_TKD, v_TKD, kv_cache, slot_mapping_T)
    turns: tuple[int, int, int, bool] = _NO_ROTARY
    if rotary is not None:
        positions_T, table = rotary.positions_T, rotary.cos_sin_PR
        _check_rotary(positions_T, table, q_THD.shape[2])
        _require(positions_T.shape[0] >= q_THD.shape[0], "rotary: one position per token")
        turns = positions_T.data_ptr(), table.data_ptr(), table.shape[1], rotary.is_neox
    _attend(
        q_THD, kv_cache, block_table_RB, query_start_loc_R1, seq_lens_R, scale, sliding_window, softcap, out_THD, new,
        turns,
    )  # fmt: skip


def _attend(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_RB: torch.Tensor,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    out_THD: torch.Tensor,
    new: tuple[int, int, int, int, int],
    turns: tuple[int, int, int, bool],
) -> None:
    _require(q_THD.dim() == 3, "attention: [T, H, D] expected")
    _, heads, size = q_THD.shape
    kind, scaled = _page_facts(kv_cache, size)
    kv_heads, block_size = kv_cache.shape[2:4]
    _require(heads % kv_heads == 0, "attention: heads and cache disagree")
    _require(q_THD.shape == out_THD.shape, "attention: query and output must agree")
    _require(q_THD.dtype == out_THD.dtype, "attention: query and output must share a dtype")
    _require(q_THD.stride()[1:] == (size, 1) and out_THD.is_contiguous(), "attention: heads must be contiguous")
    requests = seq_lens_R.shape[0]
    _require(
        block_table_RB.shape[0] >= requests and query_start_loc_R1.shape[0] == requests + 1,
        "attention: a block table row per request and a query start more expected",
    )
    for index in (block_table_RB, query_start_loc_R1, seq_lens_R):
        _require(index.dtype == torch.int32 and index.stride(-1) == 1, "attention: indices are contiguous int32")
    _C.attention(
        _DTYPES[q_THD.dtype], kind, scaled, out_THD.data_ptr(), q_THD.data_ptr(), kv_cache.data_ptr(),
        block_table_RB.data_ptr(), query_start_loc_R1.data_ptr(), seq_lens_R.data_ptr(), requests,
        block_table_RB.stride(0), q_THD.stride(0), heads, kv_heads, size, block_size, sliding_window, scale, softcap,
        *new, *turns,
    )  # fmt: skip


LINEAR_TILE = 32
"""Outputs per tile of packed weights."""


def can_pack_linear(weight_NK: torch.Tensor) -> bool:
    """Whether :func:`pack_linear` takes this matrix."""
    if weight_NK.dim() != 2:
        return False
    n, k = weight_NK.shape
    return packed_linear_shape(n, k, weight_NK.dtype) is not None


def packed_linear_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Shape of a packed matrix [n, k]: (⌈n/32⌉, k/2, 32, 2) for bf16, (⌈n/32⌉, k, 32) for f32; None if it cannot be."""
    tiles = -(-n // LINEAR_TILE)
    if dtype == torch.float32:
        return tiles, k, LINEAR_TILE
    return (tiles, k // 2, LINEAR_TILE, 2) if dtype == torch.bfloat16 and k % 2 == 0 else None


def pack_linear(weight_NK: torch.Tensor) -> torch.Tensor:
    """Weights [N, K] in the order the kernel streams them, of :func:`packed_linear_shape`."""
    _require(can_pack_linear(weight_NK), "pack_linear: float32 or bfloat16 of even width")
    n, k = weight_NK.shape
    shape = packed_linear_shape(n, k, weight_NK.dtype)
    assert shape is not None
    packed = empty_weight(shape, weight_NK.dtype)
    _pack_tiles(packed, weight_NK)
    return packed


def pack_linear_rows(packed: torch.Tensor, first: int, rows_RK: torch.Tensor) -> None:
    """Write rows [R, K] of a matrix, from row ``first`` on, into its packed form; other rows stay as they are."""
    end, most = first + rows_RK.shape[0], packed.shape[0] * LINEAR_TILE
    _require(
        packed.is_contiguous() and 0 <= first <= end <= most and rows_RK.dim() == 2 and rows_RK.dtype == packed.dtype
        and packed.shape == packed_linear_shape(most, rows_RK.shape[1], packed.dtype),
        "pack_linear_rows: rows and packed matrix must agree in width and dtype",
    )  # fmt: skip
    whole = range(-(-first // LINEAR_TILE), end // LINEAR_TILE)
    if whole:
        rows = rows_RK[whole.start * LINEAR_TILE - first : whole.stop * LINEAR_TILE - first]
        _pack_tiles(packed[whole.start : whole.stop], rows)
    for tile in sorted({first // LINEAR_TILE, (end - 1) // LINEAR_TILE} - set(whole)) if end > first else ():
        start = tile * LINEAR_TILE
        matrix = packed_rows(packed, torch.arange(start, start + LINEAR_TILE))
        low, high = max(first, start), min(end, start + LINEAR_TILE)
        matrix[low - start : high - start] = rows_RK[low - first : high - first]
        _pack_tiles(packed[tile : tile + 1], matrix)


def _pack_tiles(packed: torch.Tensor, rows_NK: torch.Tensor) -> None:
    _require(rows_NK.is_contiguous() and rows_NK.dtype == packed.dtype, "pack_linear: contiguous rows of one dtype")
    _C.pack_linear(_DTYPES[packed.dtype], packed.data_ptr(), rows_NK.data_ptr(), *rows_NK.shape)


def packed_rows(packed: torch.Tensor, rows_T: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Rows of the matrix that :func:`pack_linear` packed: int64 [T] → [T, K], in its dtype or float32."""
    return _matrix_rows(packed, packed[0].numel() // LINEAR_TILE, rows_T, dtype, True)


_STORE = 0
_GATED = _Codes({"silu": 1, "gelu": 2, "gelu_tanh": 3})


def _linear(
    x_TK: torch.Tensor,
    packed: torch.Tensor,
    num_outputs: int,
    bias_N: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: int,
) -> None:
    k = x_TK.shape[-1]
    lanes = (LINEAR_TILE,) if x_TK.dtype == torch.float32 else (LINEAR_TILE, 2)
    _require(
        x_TK.dtype == packed.dtype and packed.shape[2:] == lanes and packed.shape[1] * len(lanes) == k,
        "linear: x and weights must agree in width and dtype",
    )
    _require(packed.shape[0] == -(-num_outputs // LINEAR_TILE) and packed.is_contiguous(), "linear: other weights")
    _require(
        bias_N is None or (bias_N.dtype == x_TK.dtype and bias_N.shape == (num_outputs,) and bias_N.is_contiguous()),
        "linear: the bias must be one number per output, in x's dtype",
    )
    _require(out.dtype in (x_TK.dtype, torch.float32), "linear: the output has x's dtype or is float32")
    x = x_TK if x_TK.dim() == 2 and x_TK.stride(1) == 1 else x_TK.reshape(-1, k).contiguous()
    _C.linear(
        _DTYPES[x.dtype], _DTYPES[out.dtype], out.data_ptr(), x.data_ptr(), packed.data_ptr(),
        0 if bias_N is None else bias_N.data_ptr(), x.shape[0], num_outputs, k, x.stride(0), out.shape[-1], epilogue,
    )  # fmt: skip


def linear(
    x_TK: torch.Tensor,
    packed: torch.Tensor,
    num_outputs: int,
    bias_N: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x Wᵀ (+ bias) with packed weights: [..., K] → [..., N]. Sums are float32; so is the output if ``out_dtype``
    says so, else it has x's dtype."""
    out = empty((*x_TK.shape[:-1], num_outputs), out_dtype or x_TK.dtype)
    _linear(x_TK, packed, num_outputs, bias_N, out, _STORE)
    return out


def gated_linear(
    x_TK: torch.Tensor, packed: torch.Tensor, num_outputs: int, bias_2F: torch.Tensor | None, activation: str
) -> torch.Tensor:
    code, width = _GATED[activation], num_outputs // 2
    _require(num_outputs % 2 == 0, "gated_linear: gate and up halves expected")
    if width % LINEAR_TILE:  # the halves share a tile
        both = linear(x_TK, packed, num_outputs, bias_2F)
        return _activation(both, code - _GATED["silu"] + _SILU, True)
    out = empty((*x_TK.shape[:-1], width), x_TK.dtype)
    _linear(x_TK, packed, num_outputs, bias_2F, out, code)
    return out


GGUF_PACKABLE = frozenset(
    [
        *(GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0),
        *(GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K),
    ]
)
"""GGUF storage types that :func:`gguf_linear` multiplies by as they are."""


def pack_gguf_linear(data: memoryview | torch.Tensor, ggml_type: int, shape: tuple[int, int]) -> torch.Tensor:
    """A GGUF matrix's raw bytes, rows of ``shape`` = (N, K), in the order :func:`gguf_linear` streams them: uint8 [.].

    Bits are kept; of the K types, scales are rounded to half precision (4.5 → 5 and 5.5 → 6 bits a weight).

    Raises:
        ValueError: the type is not in GGUF_PACKABLE, K is no whole number of blocks, or bytes are missing.
    """
    _require(ggml_type in GGUF_PACKABLE, f"GGUF storage type {ggml_type} has no product")
    raw = _gguf_bytes(data, ggml_type, shape)
    n, k = shape
    packed = _weights.empty((_C.gguf_packed_bytes(int(ggml_type), n, k),), torch.uint8)
    _C.pack_gguf(int(ggml_type), packed.data_ptr(), raw.ctypes.data, n, k)
    return packed


def gguf_rows(packed: torch.Tensor, ggml_type: int, k: int, rows_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the matrix that :func:`pack_gguf_linear` packed: int64 [T] → [T, K]."""
    _require(rows_T.dtype == torch.int64 and rows_T.is_contiguous(), "gguf_rows: contiguous int64 rows expected")
    out = empty((rows_T.numel(), k), dtype)
    _C.gguf_rows(
        int(ggml_type), _DTYPES[dtype], out.data_ptr(), packed.data_ptr(), rows_T.data_ptr(), rows_T.numel(), k
    )
    return out


GGUF_INPUT_BYTES = 80
"""What :func:`gguf_linear` keeps of each 32 inputs of a row."""
GGUF_INPUT_ROWS = 16
"""It keeps a multiple of so many rows."""


def gguf_linear(
    x_TK: torch.Tensor,
    matrices: Sequence[GGUFMatrix],
    bias_N: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x times each matrix, side by side (+ bias): [..., K] → [..., N] in ``out_dtype``, else in x's dtype.

    x is rounded to 16 bits with one scale per 32 inputs; integers are summed exactly, groups in float32. Many rows of
    bfloat16 on a machine with matrix tiles: the weights are rounded to bfloat16 instead.
    """
    k, n = x_TK.shape[-1], sum(matrix.num_outputs for matrix in matrices)
    for packed, ggml_type, num_outputs in matrices:
        _require(
            ggml_type in GGUF_PACKABLE and packed.dtype == torch.uint8 and packed.is_contiguous() and k % 32 == 0
            and packed.numel() == _C.gguf_packed_bytes(int(ggml_type), num_outputs, k),
            "gguf_linear: these weights were packed for another type or shape",
        )  # fmt: skip
    _require(
        bias_N is None or (bias_N.dtype == x_TK.dtype and bias_N.shape == (n,) and bias_N.is_contiguous()),
        "gguf_linear: the bias must be one number per output, in x's dtype",
    )
    x = x_TK if x_TK.dim() == 2 and x_TK.stride(1) == 1 else x_TK.reshape(-1, k).contiguous()
    out = empty((*x_TK.shape[:-1], n), out_dtype or x_TK.dtype)
    _require(out.dtype in (x.dtype, torch.float32), "gguf_linear: the output has x's dtype or is float32")
    rows, dtype, item, bias_item = x.shape[0], _DTYPES[x.dtype], out.itemsize, x.itemsize
    kept_rows = -(-rows // GGUF_INPUT_ROWS) * GGUF_INPUT_ROWS
    inputs = empty((kept_rows, k // 32 * GGUF_INPUT_BYTES), torch.uint8)
    _C.gguf_inputs(dtype, inputs.data_ptr(), x.data_ptr(), rows, k, x.stride(0))
    first = 0
    for packed, ggml_type, num_outputs in matrices:
        _C.gguf_linear(
            int(ggml_type), dtype, _DTYPES[out.dtype], out.data_ptr() + first * item, inputs.data_ptr(),
            packed.data_ptr(), 0 if bias_N is None else bias_N.data_ptr() + first * bias_item, rows, num_outputs, k, n,
        )  # fmt: skip
        first += num_outputs
    return out


def _gguf_bytes(data: memoryview | torch.Tensor, ggml_type: int, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes of a GGUF tensor, checked to be enough for its shape."""
    # Through numpy, because torch warns about buffers it cannot write, such as a mapped file.
    raw: np.ndarray = data.numpy() if isinstance(data, torch.Tensor) else np.frombuffer(data, dtype=np.uint8)
    per_block, block_bytes = BLOCK_SIZES[GGMLType(ggml_type)]
    _require(math.prod(shape[-1:]) % per_block == 0, f"{shape} is no whole number of blocks of {per_block} a row")
    needed = math.prod(shape) // per_block * block_bytes
    _require(raw.flags.c_contiguous and raw.nbytes >= needed, f"{needed} bytes expected, {raw.nbytes} given")
    return raw


def dequantize_gguf(
    data: memoryview | torch.Tensor, ggml_type: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Expand a GGUF tensor's raw bytes to ``shape`` in ``dtype``.

    Raises:
        ValueError: the type is not in DEQUANTIZABLE, the last axis is no whole number of blocks, or bytes are missing.
    """
    _require(ggml_type in DEQUANTIZABLE, f"GGUF storage type {ggml_type} has no kernel")
    raw = _gguf_bytes(data, ggml_type, shape)
    out = torch.empty(shape, dtype=dtype)
    _C.dequantize(_DTYPES[dtype], out.data_ptr(), raw.ctypes.data, int(ggml_type), out.numel())
    return out
