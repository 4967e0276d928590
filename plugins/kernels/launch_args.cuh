// Argument blocks of the kernels, passed by value: one struct per path.
//
// Mirrored by launch/args.py; a test compiles the proof that sizes and offsets agree. Change
// both together. T token rows, N sequence rows, M page-table width; Hq query heads, Hkv key
// heads, D and Dv elements of a key and a value head.
#pragma once

// NVRTC has no <cstdint>, and its built-in names differ between versions.
namespace paged_trt {

using int32_t = int;
using int64_t = long long;
static_assert(sizeof(int32_t) == 4 && sizeof(int64_t) == 8, "sizes of the integer types");

// Rotate, quantise and write the new keys and values of a step.
struct AppendArgs {
  const void* key;  // [T, Hkv, D]
  const void* value;  // [T, Hkv, Dv]
  void* key_pool;  // [num_pages, Hkv, 128, D]
  void* value_pool;  // [num_pages, Hkv, 128, Dv]
  const int32_t* page_table;  // [N, M], -1 unused
  const int32_t* query_start_offsets;  // [N + 1]
  const int32_t* past_lens;  // [N], tokens before this step
  const float* rope_cos_sin;  // [max_positions, 2, rotary_dim / 2]
  const float* kv_scales;  // [2, Hkv], keys before values
  int32_t* counters;  // [num_counters], of the attention behind: set to zero
  int64_t key_token_stride;  // elements
  int64_t value_token_stride;  // elements
  int32_t num_tokens;  // T
  int32_t num_seqs;  // N
  int32_t table_width;  // M
  int32_t num_pages;
  int32_t num_kv_heads;  // Hkv
  int32_t rope;  // 0 none, 1 half-split, 2 interleaved
  int32_t rotary_dim;  // 0 without rope
  int32_t num_counters;
  int32_t rounds_per_warp;  // from 1 to 4
};

// Attend one token per sequence, all keys in one block or one cluster of blocks.
struct DecodeDirectArgs {
  const void* query;  // [T, Hq, D]
  const void* key_pool;  // [num_pages, Hkv, 128, D]
  const void* value_pool;  // [num_pages, Hkv, 128, Dv]
  const int32_t* page_table;  // [N, M], -1 unused
  const int32_t* query_start_offsets;  // [N + 1]
  const int32_t* past_lens;  // [N], tokens before this step
  const float* rope_cos_sin;  // [max_positions, 2, rotary_dim / 2]
  const float* kv_scales;  // [2, Hkv], keys before values
  const float* sinks;  // [Hq]
  void* output;  // [T, Hq, Dv]
  int64_t query_token_stride;  // elements
  int64_t output_token_stride;  // elements
  int32_t num_seqs;  // N
  int32_t table_width;  // M
  int32_t num_pages;
  int32_t num_kv_heads;  // Hkv
  int32_t rope;  // 0 none, 1 half-split, 2 interleaved
  int32_t rotary_dim;  // 0 without rope
  int32_t window;  // -1: all keys
  float softmax_scale;
  float softcap;  // 0: off
};

// Attend one token per sequence in blocks that share keys; the last block to arrive at a counter
// merges. A slot holds what one block leaves of one (sequence, block of heads).
struct DecodeCounterArgs {
  const void* query;  // [T, Hq, D]
  const void* key_pool;  // [num_pages, Hkv, 128, D]
  const void* value_pool;  // [num_pages, Hkv, 128, Dv]
  const int32_t* page_table;  // [N, M], -1 unused
  const int32_t* query_start_offsets;  // [N + 1]
  const int32_t* past_lens;  // [N], tokens before this step
  const float* rope_cos_sin;  // [max_positions, 2, rotary_dim / 2]
  const float* kv_scales;  // [2, Hkv], keys before values
  const float* sinks;  // [Hq]
  void* output;  // [T, Hq, Dv]
  float* partial_output;  // [slots, heads of a block, Dv]
  float* partial_lse;  // [slots, heads of a block], base 2
  int32_t* counters;  // [N, Hkv, blocks of heads], zero before the launch and after it
  int64_t query_token_stride;  // elements
  int64_t output_token_stride;  // elements
  int32_t num_seqs;  // N
  int32_t table_width;  // M
  int32_t num_pages;
  int32_t num_kv_heads;  // Hkv
  int32_t rope;  // 0 none, 1 half-split, 2 interleaved
  int32_t rotary_dim;  // 0 without rope
  int32_t window;  // -1: all keys
  float softmax_scale;
  float softcap;  // 0: off
  int32_t num_blocks;  // that share a sequence, or the whole batch
};

// Attend one partition of the keys of one token per sequence.
struct DecodeSplitArgs {
  const void* query;  // [T, Hq, D]
  const void* key_pool;  // [num_pages, Hkv, 128, D]
  const void* value_pool;  // [num_pages, Hkv, 128, Dv]
  const int32_t* page_table;  // [N, M], -1 unused
  const int32_t* query_start_offsets;  // [N + 1]
  const int32_t* past_lens;  // [N], tokens before this step
  const float* rope_cos_sin;  // [max_positions, 2, rotary_dim / 2]
  const float* kv_scales;  // [2, Hkv], keys before values
  float* partial_output;  // [N, Hq, num_partitions, Dv]
  float* partial_lse;  // [N, Hq, num_partitions], base 2
  int64_t query_token_stride;  // elements
  int32_t num_seqs;  // N
  int32_t table_width;  // M
  int32_t num_pages;
  int32_t num_kv_heads;  // Hkv
  int32_t rope;  // 0 none, 1 half-split, 2 interleaved
  int32_t rotary_dim;  // 0 without rope
  int32_t window;  // -1: all keys
  float softmax_scale;
  float softcap;  // 0: off
  int32_t partition_tokens;  // multiple of 128
  int32_t threshold_tokens;  // no more keys than this: one partition
  int32_t num_partitions;
};

// Merge the partitions of a split decode, sink included.
struct MergeArgs {
  const float* partial_output;  // [N, Hq, num_partitions, Dv]
  const float* partial_lse;  // [N, Hq, num_partitions], base 2
  const int32_t* query_start_offsets;  // [N + 1]
  const int32_t* past_lens;  // [N], tokens before this step
  const float* sinks;  // [Hq]
  void* output;  // [T, Hq, Dv]
  int64_t output_token_stride;  // elements
  int32_t num_seqs;  // N
  int32_t table_width;  // M
  int32_t num_q_heads;  // Hq
  int32_t window;  // -1: all keys
  int32_t partition_tokens;  // multiple of 128
  int32_t threshold_tokens;  // no more keys than this: one partition
  int32_t num_partitions;
};

// Attend packed ragged tokens; the keys of the step are in the pool already.
struct PrefillArgs {
  const void* query;  // [T, Hq, D]
  const void* key_pool;  // [num_pages, Hkv, 128, D]
  const void* value_pool;  // [num_pages, Hkv, 128, Dv]
  const int32_t* page_table;  // [N, M], -1 unused
  const int32_t* query_start_offsets;  // [N + 1]
  const int32_t* past_lens;  // [N], tokens before this step
  const float* rope_cos_sin;  // [max_positions, 2, rotary_dim / 2]
  const float* kv_scales;  // [2, Hkv], keys before values
  const float* sinks;  // [Hq]
  void* output;  // [T, Hq, Dv]
  int64_t query_token_stride;  // elements
  int64_t output_token_stride;  // elements
  int32_t num_tokens;  // T
  int32_t num_seqs;  // N
  int32_t table_width;  // M
  int32_t num_pages;
  int32_t num_kv_heads;  // Hkv
  int32_t rope;  // 0 none, 1 half-split, 2 interleaved
  int32_t rotary_dim;  // 0 without rope
  int32_t window;  // -1: all keys
  float softmax_scale;
  float softcap;  // 0: off
};

// Gather the pages that a prefill step reads out of an 8-bit pool. Gathered pages hold elements of
// the activations' type; there is a slot for every page that the step may read.
struct GatherArgs {
  const void* key_pool;  // [num_pages, Hkv, 128, D]
  const void* value_pool;  // [num_pages, Hkv, 128, Dv]
  const int32_t* page_table;  // [N, M], -1 unused
  const int32_t* query_start_offsets;  // [N + 1]
  const int32_t* past_lens;  // [N], tokens before this step
  void* gathered_keys;  // [slots, Hkv, 128, D]
  void* gathered_values;  // [slots, Hkv, 128, Dv]
  int32_t* gathered_table;  // [N, M], slots; written where a query sees the page
  int32_t* tile_counter;  // of the prefill behind: set to zero
  int32_t num_seqs;  // N
  int32_t table_width;  // M
  int32_t num_pages;
  int32_t num_kv_heads;  // Hkv
  int32_t window;  // -1: all keys
};

// A tensor map of the driver's.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// The same for Hopper: keys and values come by bulk tensor copies, from the pools or from the pages
// that were gathered out of them, which then are what maps, page table and page count are about.
struct PrefillSm90Args {
  TensorMap key_map;  // of the key pool
  TensorMap value_map;  // of the value pool
  const void* query;  // [T, Hq, D]
  const int32_t* page_table;  // [N, M], -1 unused
  const int32_t* query_start_offsets;  // [N + 1]
  const int32_t* past_lens;  // [N], tokens before this step
  const float* rope_cos_sin;  // [max_positions, 2, rotary_dim / 2]
  const float* sinks;  // [Hq]
  void* output;  // [T, Hq, Dv]
  int32_t* tile_counter;  // 0 at the start and at the end; null: tiles are dealt out
  int64_t query_token_stride;  // elements
  int64_t output_token_stride;  // elements
  int32_t num_tokens;  // T
  int32_t num_seqs;  // N
  int32_t table_width;  // M
  int32_t num_pages;
  int32_t num_kv_heads;  // Hkv
  int32_t rope;  // 0 none, 1 half-split, 2 interleaved
  int32_t rotary_dim;  // 0 without rope
  int32_t window;  // -1: all keys
  float softmax_scale;  // positive
  float softcap;  // 0: off
  const float* kv_scales;  // [2, Hkv], keys before values; read where pages were gathered
};

}  // namespace paged_trt
