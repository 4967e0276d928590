"""Argument blocks of the kernels: one struct per path, passed by value.

Each mirrors the struct of the same name in `kernels/launch_args.cuh`; a test compiles the
proof that sizes and offsets agree. One struct per path, because in a shared one a field that
one path needs could sit silently at zero on another. Strides and counts of elements are
64-bit: a pool passes 2^31 elements. Sizes of a step (T, N, M) and page ids are int32.
"""

from __future__ import annotations

import ctypes
from typing import Final

Pointer = ctypes.c_uint64
"""Device address."""
TensorMap = ctypes.c_uint64 * 16
"""A tensor map of the driver's, opaque."""


class AppendArgs(ctypes.Structure):
    """Rotate, quantise and write the new keys and values of a step."""

    _fields_ = (
        ("key", Pointer),
        ("value", Pointer),
        ("key_pool", Pointer),
        ("value_pool", Pointer),
        ("page_table", Pointer),
        ("query_start_offsets", Pointer),
        ("past_lens", Pointer),
        ("rope_cos_sin", Pointer),
        ("kv_scales", Pointer),
        ("counters", Pointer),
        ("key_token_stride", ctypes.c_int64),
        ("value_token_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("num_counters", ctypes.c_int32),
        ("rounds_per_warp", ctypes.c_int32),
    )


class DecodeDirectArgs(ctypes.Structure):
    """Attend one token per sequence, all keys in one block or one cluster of blocks."""

    _fields_ = (
        ("query", Pointer),
        ("key_pool", Pointer),
        ("value_pool", Pointer),
        ("page_table", Pointer),
        ("query_start_offsets", Pointer),
        ("past_lens", Pointer),
        ("rope_cos_sin", Pointer),
        ("kv_scales", Pointer),
        ("sinks", Pointer),
        ("output", Pointer),
        ("query_token_stride", ctypes.c_int64),
        ("output_token_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class DecodeCounterArgs(ctypes.Structure):
    """Attend one token per sequence in blocks that share keys; the last to arrive merges.

    In the workspace: `partial_output` `[slots, heads of a block, Dv]` and `partial_lse` `[slots,
    heads of a block]`, float32, and `counters` `[N, Hkv, blocks of heads]`, int32.
    """

    _fields_ = (
        ("query", Pointer),
        ("key_pool", Pointer),
        ("value_pool", Pointer),
        ("page_table", Pointer),
        ("query_start_offsets", Pointer),
        ("past_lens", Pointer),
        ("rope_cos_sin", Pointer),
        ("kv_scales", Pointer),
        ("sinks", Pointer),
        ("output", Pointer),
        ("partial_output", Pointer),
        ("partial_lse", Pointer),
        ("counters", Pointer),
        ("query_token_stride", ctypes.c_int64),
        ("output_token_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("num_blocks", ctypes.c_int32),
    )


class DecodeSplitArgs(ctypes.Structure):
    """Attend one partition of the keys of one token per sequence.

    `partial_output` is `[N, Hq, num_partitions, Dv]` and `partial_lse`, the base-2 log of the sum
    of exponentials, `[N, Hq, num_partitions]`, both float32 in the workspace. Sinks come in when
    the partitions are merged.
    """

    _fields_ = (
        ("query", Pointer),
        ("key_pool", Pointer),
        ("value_pool", Pointer),
        ("page_table", Pointer),
        ("query_start_offsets", Pointer),
        ("past_lens", Pointer),
        ("rope_cos_sin", Pointer),
        ("kv_scales", Pointer),
        ("partial_output", Pointer),
        ("partial_lse", Pointer),
        ("query_token_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("partition_tokens", ctypes.c_int32),
        ("threshold_tokens", ctypes.c_int32),
        ("num_partitions", ctypes.c_int32),
    )


class MergeArgs(ctypes.Structure):
    """Merge the partitions of a split decode, sink included."""

    _fields_ = (
        ("partial_output", Pointer),
        ("partial_lse", Pointer),
        ("query_start_offsets", Pointer),
        ("past_lens", Pointer),
        ("sinks", Pointer),
        ("output", Pointer),
        ("output_token_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_q_heads", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("partition_tokens", ctypes.c_int32),
        ("threshold_tokens", ctypes.c_int32),
        ("num_partitions", ctypes.c_int32),
    )


class PrefillArgs(ctypes.Structure):
    """Attend packed ragged tokens; the keys of the step are in the pool already."""

    _fields_ = (
        ("query", Pointer),
        ("key_pool", Pointer),
        ("value_pool", Pointer),
        ("page_table", Pointer),
        ("query_start_offsets", Pointer),
        ("past_lens", Pointer),
        ("rope_cos_sin", Pointer),
        ("kv_scales", Pointer),
        ("sinks", Pointer),
        ("output", Pointer),
        ("query_token_stride", ctypes.c_int64),
        ("output_token_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class GatherArgs(ctypes.Structure):
    """Gather the pages that a prefill step reads out of an 8-bit pool."""

    _fields_ = (
        ("key_pool", Pointer),
        ("value_pool", Pointer),
        ("page_table", Pointer),
        ("query_start_offsets", Pointer),
        ("past_lens", Pointer),
        ("gathered_keys", Pointer),
        ("gathered_values", Pointer),
        ("gathered_table", Pointer),
        ("tile_counter", Pointer),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("window", ctypes.c_int32),
    )


class PrefillSm90Args(ctypes.Structure):
    """The same on Hopper, where keys and values come by bulk tensor copies.

    `key_map` and `value_map` are tensor maps of the pools; `tile_counter` is 0 before a
    launch and after it, or null for a fixed order of the tiles. Where pages were gathered, maps,
    `page_table` and `num_pages` are about those, and `kv_scales` is read.
    """

    _fields_ = (
        ("key_map", TensorMap),
        ("value_map", TensorMap),
        ("query", Pointer),
        ("page_table", Pointer),
        ("query_start_offsets", Pointer),
        ("past_lens", Pointer),
        ("rope_cos_sin", Pointer),
        ("sinks", Pointer),
        ("output", Pointer),
        ("tile_counter", Pointer),
        ("query_token_stride", ctypes.c_int64),
        ("output_token_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("kv_scales", Pointer),
    )


class SampleArgs(ctypes.Structure):
    """Choose a token for each row of logits.

    `rows` is `[N]` of `sampling.SampleRow`, `logprobs` `[N]` float32, or 0 where nobody asks.
    """

    _fields_ = (
        ("logits", Pointer),
        ("rows", Pointer),
        ("tokens", Pointer),
        ("logprobs", Pointer),
        ("row_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
    )


class TakeTokensArgs(ctypes.Structure):
    """Put what the step before chose where the ids of a step say so, `-1 - row`."""

    _fields_ = (
        ("ids", Pointer),
        ("tokens", Pointer),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
    )


ARGUMENT_STRUCTS: Final = (
    AppendArgs,
    DecodeDirectArgs,
    DecodeCounterArgs,
    DecodeSplitArgs,
    MergeArgs,
    PrefillArgs,
    GatherArgs,
    PrefillSm90Args,
    SampleArgs,
    TakeTokensArgs,
)


def layout_proof(structs: tuple[type[ctypes.Structure], ...] = ARGUMENT_STRUCTS) -> str:
    """CUDA source that compiles only where the header agrees with `structs`.

    It checks the size of each struct, and offset and size of each field.
    """
    headers = ("launch_args.cuh", "sample_args.cuh", "take_tokens_args.cuh")
    lines = [f'#include "{header}"' for header in headers]
    for struct in structs:
        name = f"paged_trt::{struct.__name__}"
        lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");')
        for field, *_ in struct._fields_:
            member = getattr(struct, field)
            text = f"{name}.{field}"
            lines.append(
                # NVRTC before 13.1 has neither offsetof nor __builtin_offsetof.
                f'static_assert(__INTADDR__(&(({name}*)0)->{field}) == {member.offset}, "{text}");'
            )
            lines.append(
                f'static_assert(sizeof((({name}*)0)->{field}) == {member.size}, "{text}");'
            )
    return "\n".join(lines) + "\n"
