// Paged prefill for Hopper (sm_90a): bulk tensor copies, wgmma, one block a multiprocessor.
//
// A block works through query tiles of 128 rows, kTokens tokens times the heads of a group, against
// the key tiles that they see, last to first. One warp copies keys and values, a tile ahead; three
// choose the next query tile and bring its rows; two warpgroups of 64 rows each do the rest. Scores
// come from shared memory, weights go to the value product in registers.
//
// In the loop over full tiles no maximum is computed (see prefill_sm90_softmax.cuh) and the value
// product is never waited for: weights have two sets of registers, and values three stages. Masks,
// the edges of a window and invalid pages are left to the loops around it.
//
// A page id outside of the pool becomes a place outside of the map: zeros arrive and nothing is
// read. Values that no row of a tile sees are made zero, because a weight of 0 does not hide NaN.
//
// `is_split`: the blocks of a cluster share the keys of one tile and merge what they get.
#pragma once

#include "attention_output.cuh"
#include "dependent_launch.cuh"
#include "prefill_sm90_query.cuh"
#include "prefill_sm90_softmax.cuh"
#include "prefill_sm90_tiles.cuh"
#include "wgmma.cuh"

namespace paged_trt {

constexpr int kPrefillThreads = 384;
constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;  // 168 each at the start
constexpr int kWarpgroupBarrier = 1;  // and 2; 3 is kLoaderBarrier
constexpr int kConsumerBarrier = 4;

// A query tile, as the blocks' warps hand it on.
struct QueryWork {
  int32_t first_token;  // token row
  int32_t num_rows;
  int32_t position;  // of the first token
  int32_t kv_head;  // -1: no tile is left
  int32_t last, first;  // key tiles
  int32_t sequence;
  int32_t flags;
};
constexpr int kFirstToken = 0, kNumRows = 1, kPosition = 2, kKvHead = 3;
constexpr int kLast = 4, kFirst = 5, kSequence = 6, kFlags = 7;
constexpr int32_t kHasInvalidPages = 1;
constexpr int32_t kHasDeadRows = 2;  // the last key tile reaches beyond the sequence

// Place in a ring of buffers.
template <int count>
struct RingPlace {
  uint32_t stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Element, int head_dim, int value_head_dim, int group_size, bool has_window,
          bool has_softcap, bool is_split>
struct PrefillSm90 {
  static_assert(head_dim % 64 == 0 && value_head_dim % 64 == 0, "whole boxes of 64 columns");
  static_assert(value_head_dim <= head_dim, "outputs go through the query's buffer");
  static_assert(group_size <= kQueryRows, "a tile holds one token at least");
  // Accumulators of wide heads leave registers for the scores of 64 keys only.
  static constexpr bool kIsWide = head_dim > 128;
  static constexpr int kKeys = kIsWide ? 64 : 128;
  // Weights without a maximum need the scores kept until they are known to be good: too many
  // registers beside wide accumulators, and little won beside tanh.
  static constexpr bool kTries = !kIsWide && !has_softcap;
  static constexpr int kTokens = kQueryRows / group_size;
  static constexpr int kSteps = kKeys / 16;
  static constexpr int kBox = kKeys * 128;
  static constexpr int kQueryBytes = kQueryRows * head_dim * 2;
  static constexpr int kKeyBytes = kKeys * head_dim * 2;
  static constexpr int kValueBytes = kKeys * value_head_dim * 2;
  static constexpr int kQueryStages = kIsWide ? 1 : 2;
  static constexpr int kKeyStages = 2;
  static constexpr int kValueStages = 3;
  static constexpr int kKeysAt = kQueryStages * kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
  static constexpr int kBarriersAt = kValuesAt + kValueStages * kValueBytes;
  static constexpr int kWorkAt = kBarriersAt + 128;
  static constexpr int kSharedBytes = kWorkAt + 64 + 1024;  // the base is rounded up to 1,024
  // Partial outputs of a split tile replace keys and values; 8 floats of padding spread the banks.
  static constexpr int kPartialStride = (value_head_dim + 8) * 4;
  static constexpr int kStatsAt = kKeysAt + kQueryRows * kPartialStride;
  static_assert(!is_split || kStatsAt + kQueryRows * 8 <= kBarriersAt, "partial outputs fit");

  using Order = TileOrder<kTokens, kKeys>;
  using Loader = QueryLoader<Element, head_dim, group_size>;
  using Scores = float[kKeys / 2];
  using Outputs = float[value_head_dim / 2];
  using Weights = uint32_t[kSteps][4];

  // Barriers, 8 bytes each.
  static __device__ __forceinline__ unsigned barrier(unsigned base, int index, uint32_t stage) {
    return base + kBarriersAt + (index + stage) * 8;
  }
  static __device__ __forceinline__ unsigned work_ready(unsigned base, uint32_t stage) {
    return barrier(base, 0, stage);
  }
  static __device__ __forceinline__ unsigned query_ready(unsigned base, uint32_t stage) {
    return barrier(base, 2, stage);
  }
  static __device__ __forceinline__ unsigned query_free(unsigned base, uint32_t stage) {
    return barrier(base, 4, stage);
  }
  static __device__ __forceinline__ unsigned key_ready(unsigned base, uint32_t stage) {
    return barrier(base, 6, stage);
  }
  static __device__ __forceinline__ unsigned key_free(unsigned base, uint32_t stage) {
    return barrier(base, 8, stage);
  }
  static __device__ __forceinline__ unsigned value_ready(unsigned base, uint32_t stage) {
    return barrier(base, 10, stage);
  }
  static __device__ __forceinline__ unsigned value_free(unsigned base, uint32_t stage) {
    return barrier(base, 13, stage);
  }

  static __device__ __forceinline__ void init_barriers(unsigned base) {
    for (int stage = 0; stage < kQueryStages; ++stage) {
      init_barrier(work_ready(base, stage), 1);
      init_barrier(query_ready(base, stage), kLoaderThreads);
      init_barrier(query_free(base, stage), 8);
    }
    for (int stage = 0; stage < kKeyStages; ++stage) {
      init_barrier(key_ready(base, stage), 1);
      init_barrier(key_free(base, stage), 8);
    }
    for (int stage = 0; stage < kValueStages; ++stage) {
      init_barrier(value_ready(base, stage), 1);
      init_barrier(value_free(base, stage), 8);
    }
    fence_barrier_init();
  }

  // Read again wherever it is needed: no register holds it during the products.
  static __device__ __forceinline__ QueryWork read_work(unsigned base, uint32_t stage) {
    QueryWork work;
    const unsigned address = base + kWorkAt + stage * 32;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(work.first_token), "=r"(work.num_rows), "=r"(work.position),
                   "=r"(work.kv_head)
                 : "r"(address)
                 : "memory");
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(work.last), "=r"(work.first), "=r"(work.sequence), "=r"(work.flags)
                 : "r"(address + 16)
                 : "memory");
    return work;
  }

  // One field of it, by its place in QueryWork.
  template <int place>
  static __device__ __forceinline__ int32_t work_field(unsigned base, uint32_t stage) {
    int32_t value;
    asm volatile("ld.shared.s32 %0, [%1];"
                 : "=r"(value)
                 : "r"(base + kWorkAt + stage * 32 + place * 4)
                 : "memory");
    return value;
  }

  static __device__ __forceinline__ void write_work(unsigned base, uint32_t stage,
                                                    const QueryWork& work) {
    const unsigned address = base + kWorkAt + stage * 32;
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(work.first_token),
                 "r"(work.num_rows), "r"(work.position), "r"(work.kv_head)
                 : "memory");
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address + 16), "r"(work.last),
                 "r"(work.first), "r"(work.sequence), "r"(work.flags)
                 : "memory");
  }

  // The id of the page of a key tile.
  static __device__ __forceinline__ int32_t page_of(const PrefillSm90Args& args, int32_t sequence,
                                                    int32_t key_tile) {
    const int32_t* row = args.page_table + static_cast<int64_t>(sequence) * args.table_width;
    return table_entry(row, args.table_width, key_tile / (kTokensPerPage / kKeys));
  }

  // ---- copies of keys and values: one thread

  struct Copier {
    const PrefillSm90Args& args;
    unsigned base;
    uint64_t policy;
    RingPlace<kKeyStages> keys;
    RingPlace<kValueStages> values;

    __device__ __forceinline__ void copy_keys(int32_t tile, int32_t head) {
      wait_barrier(key_free(base, keys.stage), keys.parity ^ 1);
      arrive_expecting(key_ready(base, keys.stage), kKeyBytes);
      const int32_t place[4] = {0, tile % (kTokensPerPage / kKeys) * kKeys, 0, head};
      copy_box(base + kKeysAt + keys.stage * kKeyBytes, &args.key_map,
               key_ready(base, keys.stage), place, policy);
      keys.advance();
    }

    __device__ __forceinline__ void copy_values(int32_t tile, int32_t head) {
      wait_barrier(value_free(base, values.stage), values.parity ^ 1);
      arrive_expecting(value_ready(base, values.stage), kValueBytes);
      const int32_t place[4] = {0, tile % (kTokensPerPage / kKeys) * kKeys, 0, head};
      copy_box(base + kValuesAt + values.stage * kValueBytes, &args.value_map,
               value_ready(base, values.stage), place, policy);
      values.advance();
    }

    // (page, head) as the maps count them; the first one beyond the pool for an invalid page.
    __device__ __forceinline__ int32_t place_of(const QueryWork& work, int32_t tile) const {
      const int32_t page = page_of(args, work.sequence, tile);
      return is_page(page, args.num_pages) ? page * args.num_kv_heads + work.kv_head
                                           : args.num_pages * args.num_kv_heads;
    }

    __device__ __forceinline__ void run() {
      RingPlace<kQueryStages> place;
      while (true) {
        wait_barrier(work_ready(base, place.stage), place.parity);
        const QueryWork work = read_work(base, place.stage);
        if (work.kv_head < 0) return;
        place.advance();
        if (is_split && work.last < work.first) continue;
        int32_t tile = work.last, head = place_of(work, tile);
        int32_t next = tile > work.first ? place_of(work, tile - 1) : 0;
        copy_keys(tile, head);
        for (; tile > work.first; --tile) {
          const int32_t before = next;
          if (tile - 1 > work.first) next = place_of(work, tile - 2);
          copy_keys(tile - 1, before);
          copy_values(tile, head);
          head = before;
        }
        copy_values(tile, head);
      }
    }
  };

  // ---- choice of query tiles and their rows: three warps, `thread` from 0

  static __device__ __forceinline__ int32_t block_index() {
    return is_split ? static_cast<int32_t>(cluster_index()) : static_cast<int32_t>(blockIdx.x);
  }

  static __device__ __forceinline__ uint32_t cluster_index() {
    uint32_t index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
  }
  static __device__ __forceinline__ int32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int32_t>(rank);
  }
  static __device__ __forceinline__ int32_t cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return static_cast<int32_t>(size);
  }

  static __device__ __forceinline__ QueryWork find_work(const PrefillSm90Args& args, Order& order,
                                                        int32_t index) {
    QueryWork work = {0, 0, 0, -1, 0, 0, 0, 0};
    if (index >= order.num_blocks * args.num_kv_heads) return work;
    const int32_t tiles = order.num_blocks * order.section_heads;
    const int32_t section = index / tiles, within = index - section * tiles;
    const int32_t first_head = section * order.section_heads;
    const int32_t heads = min(order.section_heads, args.num_kv_heads - first_head);
    const int32_t rank = within / heads;
    const QueryBlock block = order.find(rank);
    const int32_t begin = args.query_start_offsets[block.sequence] + block.block * kTokens;
    const int32_t end = args.query_start_offsets[block.sequence + 1];
    const int32_t tokens = min(kTokens, end - begin);
    const int32_t past = args.past_lens[block.sequence];
    work.first_token = begin;
    work.num_rows = tokens * group_size;
    work.position = past + block.block * kTokens;
    work.kv_head = first_head + within - rank * heads;
    work.last = (work.position + tokens - 1) / kKeys;
    work.first = has_window ? first_visible(work.position, args.window) / kKeys : 0;
    work.sequence = block.sequence;
    const int32_t length = past + end - args.query_start_offsets[block.sequence];
    work.flags = length < (work.last + 1) * kKeys ? kHasDeadRows : 0;
    bool is_invalid = false;
    for (int32_t tile = work.first + (threadIdx.x & 31); tile <= work.last; tile += 32) {
      is_invalid |= !is_page(page_of(args, work.sequence, tile), args.num_pages);
    }
    if (__any_sync(kAllLanes, is_invalid)) work.flags |= kHasInvalidPages;
    return work;
  }

  // This block's share of the keys of a split tile. It may be empty: `last` is below `first`.
  static __device__ __forceinline__ void take_share(QueryWork& work) {
    const int32_t size = cluster_size();
    const int32_t share = (work.last - work.first + size) / size;
    const int32_t last = work.last - cluster_rank() * share;
    if (cluster_rank() != 0) work.flags &= ~kHasDeadRows;
    work.first = max(work.first, last - share + 1);
    work.last = last;
  }

  // Tiles are dealt out there and back: whoever got a long one gets a short one next.
  static __device__ __forceinline__ int32_t index_of(int32_t round) {
    const int32_t blocks = gridDim.x, block = blockIdx.x;
    return round * blocks + (round & 1 ? blocks - 1 - block : block);
  }

  static __device__ __forceinline__ void choose_and_load(const PrefillSm90Args& args, unsigned base,
                                                         int thread) {
    const bool chooses = thread < 32;
    Order order = {args};
    if (chooses) order.begin((head_dim + value_head_dim) * 2);
    RingPlace<kQueryStages> place;
    for (int32_t round = 0;; ++round) {
      if (chooses) {
        const int32_t index = is_split ? block_index() : index_of(round);
        wait_barrier(query_free(base, place.stage), place.parity ^ 1);
        QueryWork work = {0, 0, 0, -1, 0, 0, 0, 0};
        if (!is_split || round == 0) work = find_work(args, order, index);
        if (is_split && work.kv_head >= 0) take_share(work);
        if (thread == 0) {
          write_work(base, place.stage, work);
          arrive(work_ready(base, place.stage));
        }
        __syncwarp();
      }
      wait_barrier(work_ready(base, place.stage), place.parity);
      const QueryWork work = read_work(base, place.stage);
      if (work.kv_head >= 0) {
        Loader::load(args, base + place.stage * kQueryBytes, work.first_token, work.num_rows,
                     work.kv_head, work.position);
      }
      arrive(query_ready(base, place.stage));
      if (work.kv_head < 0) return;
      place.advance();
    }
  }

  // Token rows after the last sequence.
  static __device__ __forceinline__ void clear_padding(const PrefillSm90Args& args, int thread) {
    const int32_t first = args.query_start_offsets[args.num_seqs];
    const int32_t chunks = args.num_kv_heads * (group_size * value_head_dim / 8);
    const int64_t count = int64_t{args.num_tokens - first} * chunks;
    for (int64_t i = int64_t{blockIdx.x} * kLoaderThreads + thread; i < count;
         i += int64_t{gridDim.x} * kLoaderThreads) {
      const int64_t token = first + i / chunks;
      Element* row = static_cast<Element*>(args.output) + token * args.output_token_stride;
      reinterpret_cast<uint4*>(row)[i % chunks] = make_uint4(0, 0, 0, 0);
    }
  }

  // ---- products and softmax: two warpgroups

  struct Consumer {
    const PrefillSm90Args& args;
    unsigned base;
    int warpgroup;  // 0 or 1
    RingPlace<kQueryStages> query;
    RingPlace<kKeyStages> keys;
    RingPlace<kValueStages> values, used_values;  // to use next; to give back next
    SoftmaxPair softmax;
    int hold;  // full tiles for which the maximum is computed all the same

    // Full tiles after one that had to be done again: references have not settled yet.
    static constexpr int kHold = 4;

    __device__ __forceinline__ bool is_lane_0() const { return (threadIdx.x & 31) == 0; }
    __device__ __forceinline__ void wait_keys() {
      wait_barrier(key_ready(base, keys.stage), keys.parity);
    }
    __device__ __forceinline__ void wait_values() {
      wait_barrier(value_ready(base, values.stage), values.parity);
    }
    __device__ __forceinline__ void free_keys() {
      if (is_lane_0()) arrive(key_free(base, keys.stage));
      keys.advance();
    }
    __device__ __forceinline__ void free_values() {
      if (is_lane_0()) arrive(value_free(base, used_values.stage));
      used_values.advance();
    }

    template <int place>
    __device__ __forceinline__ int32_t field() const {
      return work_field<place>(base, query.stage);
    }

    // Rows of this warpgroup in the query's buffer, and later of the output.
    __device__ __forceinline__ unsigned query_rows() const {
      return base + query.stage * kQueryBytes + warpgroup * (64 * 128);
    }

    // Starts the products of scores.
    __device__ __forceinline__ void score(Scores& scores, uint64_t query_rows) {
      const uint64_t key_rows = by_rows(base + kKeysAt + keys.stage * kKeyBytes);
#pragma unroll
      for (int step = 0; step < head_dim / 16; ++step) {
        const uint64_t within = step % 4 * 2;
        Wgmma<Element, kKeys>::shared(scores, query_rows + step / 4 * (kQueryRows * 8) + within,
                                      key_rows + step / 4 * (kBox / 16) + within, step != 0);
      }
      wgmma_commit();
    }

    // Starts the products of outputs.
    __device__ __forceinline__ void accumulate(Outputs& outputs, const Weights& weights) {
      wgmma_fence();
      const uint64_t rows = by_columns<kBox>(base + kValuesAt + values.stage * kValueBytes);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Wgmma<Element, value_head_dim>::registers(outputs, weights[step], rows + step * 128);
      }
      wgmma_commit();
      values.advance();
    }

    __device__ __forceinline__ void finish_outputs(Outputs& outputs) {
      wgmma_wait<0>();
      pin(outputs);
    }

    // Scores as the softmax wants them: inside of softcap they are what tanh gives.
    __device__ __forceinline__ void cap(Scores& scores) const {
      if constexpr (has_softcap) {
        const float scale = args.softmax_scale / args.softcap;
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) scores[i] = tanh_accurate(scores[i] * scale);
      }
    }

    // What the rows of this lane see of a key tile; nothing of one without a page.
    __device__ __forceinline__ VisibleColumns visible(int32_t tile) const {
      const int32_t first_position = field<kPosition>();
      const int thread = thread_here(), lane = thread & 31, warp = thread / 32 & 3;
      const int row = warpgroup * 64 + warp * 16 + lane / 4;
      const int32_t first_column = tile * kKeys + (lane & 3) * 2;
      VisibleColumns columns;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t position = first_position + (row + half * 8) / group_size;
        columns.last[half] = position - first_column;
        columns.first[half] =
            has_window ? first_visible(position, args.window) - first_column : 0;
      }
      if ((field<kFlags>() & kHasInvalidPages) != 0 &&
          !is_page(page_of(args, field<kSequence>(), tile), args.num_pages)) {
        columns.last[0] = columns.last[1] = -1;
      }
      return columns;
    }

    // A tile that is not full, after the first: the value product of the tile before runs along.
    __device__ __forceinline__ void masked_step(int32_t tile, Scores& scores, Outputs& outputs,
                                                Weights& weights, uint64_t query_rows) {
      wait_keys();
      wgmma_fence();
      score(scores, query_rows);
      wait_values();
      accumulate(outputs, weights);
      wgmma_wait<1>();
      pin(scores);
      free_keys();
      cap(scores);
      hide<has_window>(scores, visible(tile));
      float factors[2];
      const bool grows = softmax.follow(scores, factors);
      softmax.weigh(scores);
      finish_outputs(outputs);
      free_values();
      pack_weights<Element, kSteps>(weights, scores);
      if (grows) multiply_rows(outputs, factors);
    }

    // A full tile. `weights` are those of the tile before, whose product is not waited for here;
    // `is_pending`: neither was that of the tile before that.
    __device__ __forceinline__ void full_step(Scores& scores, Outputs& outputs,
                                              const Weights& weights, Weights& next,
                                              uint64_t query_rows, bool is_pending) {
      wait_keys();
      wgmma_fence();
      score(scores, query_rows);
      wait_values();
      accumulate(outputs, weights);
      wgmma_wait<1>();
      pin(scores);
      free_keys();
      if (is_pending) free_values();
      cap(scores);
      if (!kTries || hold > 0 || !softmax.try_weigh<Element, kSteps>(next, scores)) {
        hold = hold > 0 ? hold - 1 : kHold;
        float factors[2];
        const bool grows = softmax.follow(scores, factors);
        softmax.weigh(scores);
        pack_weights<Element, kSteps>(next, scores);
        if (grows) {
          finish_outputs(outputs);
          multiply_rows(outputs, factors);
        }
      }
    }

    __device__ __forceinline__ void skip_tile() {
      wait_keys();
      free_keys();
      wait_values();
      values.advance();
      free_values();
    }

    // Rows [first, end) of the values to use next become zero.
    __device__ __forceinline__ void clear_values(int32_t first, int32_t end) {
      constexpr int kChunks = value_head_dim / 8;
      const unsigned tile = base + kValuesAt + values.stage * kValueBytes;
      for (int i = first * kChunks + (thread_here() & 127); i < end * kChunks; i += 128) {
        const int row = i / kChunks, chunk = i % kChunks;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                         tile + chunk / 8 * kBox + row * 128 + chunk % 8 * 16),
                     "r"(0)
                     : "memory");
      }
      fence_async_proxy();
      sync_threads(kWarpgroupBarrier + warpgroup, 128);
    }

    // Key tiles by what they need. Those from `full_end` up have keys that come after a row of this
    // warpgroup, those below `full_begin` some that come before its window.
    struct Bounds {
      int32_t top, full_end, full_begin, first;
    };

    __device__ __forceinline__ Bounds bounds() const {
      const int32_t position = field<kPosition>(), first = field<kFirst>();
      const int32_t last_row = min(warpgroup * 64 + 63, field<kNumRows>() - 1);
      const int32_t last_position = position + last_row / group_size;
      const int32_t full_end = (position + warpgroup * 64 / group_size + 1) / kKeys;
      Bounds found = {last_position / kKeys, max(full_end, first), first, first};
      if (has_window) {
        const int32_t begin = first_visible(last_position, args.window);
        found.full_begin = max((begin + kKeys - 1) / kKeys, first);
      }
      if (field<kFlags>() & kHasInvalidPages) found.full_end = first;
      return found;
    }

    // A full tile on its own: the weights of the tile before are replaced by its own.
    __device__ __forceinline__ void lone_step(Scores& scores, Outputs& outputs, Weights& weights,
                                              uint64_t query_rows) {
      wait_keys();
      wgmma_fence();
      score(scores, query_rows);
      wait_values();
      accumulate(outputs, weights);
      wgmma_wait<1>();
      pin(scores);
      free_keys();
      finish_outputs(outputs);
      free_values();
      cap(scores);
      if (!kTries || hold > 0 || !softmax.try_weigh<Element, kSteps>(weights, scores)) {
        float factors[2];
        softmax.follow(scores, factors);
        softmax.weigh(scores);
        pack_weights<Element, kSteps>(weights, scores);
        multiply_rows(outputs, factors);
      }
    }

    // Outputs of the tile, not normalised. False: there is no key tile or no row to work on.
    __device__ __forceinline__ bool attend(Outputs& outputs) {
      int32_t tile = field<kLast>();
      softmax.begin();
      hold = 0;
      const Bounds limits = bounds();
      if (field<kNumRows>() <= warpgroup * 64) {
        for (; tile >= limits.first; --tile) skip_tile();
        return false;
      }
      if (is_split && tile < limits.first) return false;
      for (; tile > limits.top && tile > limits.first; --tile) skip_tile();
      const uint64_t rows = by_rows(query_rows());
      Scores scores;
      Weights weights;
      wait_keys();
      wgmma_fence();
      score(scores, rows);
#pragma unroll
      for (int i = 0; i < value_head_dim / 2; ++i) outputs[i] = 0.f;
      wgmma_wait<0>();
      pin(scores);
      free_keys();
      cap(scores);
      hide<has_window>(scores, visible(tile));
      float factors[2];
      softmax.follow(scores, factors);
      softmax.weigh(scores);
      pack_weights<Element, kSteps>(weights, scores);
      if ((field<kFlags>() & kHasDeadRows) != 0 && tile == field<kLast>()) {
        wait_values();
        const int32_t last = field<kPosition>() + (field<kNumRows>() - 1) / group_size;
        clear_values(last + 1 - tile * kKeys, kKeys);
      }
      for (--tile; tile >= limits.full_end; --tile) {
        masked_step(tile, scores, outputs, weights, rows);
      }
      Weights others;
      bool is_pending = false;
      for (; tile > limits.full_begin; tile -= 2) {
        full_step(scores, outputs, weights, others, rows, is_pending);
        full_step(scores, outputs, others, weights, rows, true);
        is_pending = true;
      }
      finish_outputs(outputs);
      if (is_pending) free_values();
      if (tile >= limits.full_begin && tile >= limits.first) {  // the last of an odd number
        lone_step(scores, outputs, weights, rows);
        --tile;
      }
      for (; tile >= limits.first; --tile) masked_step(tile, scores, outputs, weights, rows);
      wait_values();
      if (has_window) clear_before_window();
      accumulate(outputs, weights);
      finish_outputs(outputs);
      free_values();
      return true;
    }

    // Values before the window of the tile's first row, in the last key tile of the walk.
    __device__ __forceinline__ void clear_before_window() {
      const int32_t dead =
          first_visible(field<kPosition>(), args.window) - field<kFirst>() * kKeys;
      if (dead > 0) clear_values(0, dead);
    }

    // Normalised outputs, through this warpgroup's rows of the query's buffer to device memory.
    __device__ __forceinline__ void store(const Outputs& outputs) {
      const int thread = thread_here(), lane = thread & 31, warp_row = (thread / 32 & 3) * 16;
      float factors[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warpgroup * 64 + warp_row + lane / 4 + half * 8;
        const int head = field<kKvHead>() * group_size + row % group_size;
        const float sum = sum_of_quad(softmax.sum[half]);
        const SinkFactors sink = add_sink(softmax.exponent(half), sum, args.sinks[head]);
        factors[half] = sink.factor * normaliser(sink.sum, 1.f);
      }
      sync_threads(kWarpgroupBarrier + warpgroup, 128);  // no warp reads the query any more
      const unsigned rows = query_rows();
      const int row = warp_row + lane / 4;
#pragma unroll
      for (int column = 0; column < value_head_dim / 8; ++column) {
        const unsigned low = rows + swizzled<kQueryRows>(row, column) + (lane & 3) * 4;
        const unsigned high = rows + swizzled<kQueryRows>(row + 8, column) + (lane & 3) * 4;
        const float* four = outputs + 4 * column;
        store_word(low, pack<Element>(four[0] * factors[0], four[1] * factors[0]));
        store_word(high, pack<Element>(four[2] * factors[1], four[3] * factors[1]));
      }
      __syncwarp();
      constexpr int kChunks = value_head_dim / 8;
#pragma unroll
      for (int i = 0; i < 16 * kChunks / 32; ++i) {
        const int index = i * 32 + lane;
        const int at = warp_row + index / kChunks, chunk = index % kChunks;
        const uint4 words = load_words(rows + swizzled<kQueryRows>(at, chunk));
        const int tile_row = warpgroup * 64 + at;
        if (tile_row < field<kNumRows>()) {
          *reinterpret_cast<uint4*>(output_row(tile_row) + chunk * 8) = words;
        }
      }
      __syncwarp();
    }

    __device__ __forceinline__ Element* output_row(int row) const {
      const int64_t token = field<kFirstToken>() + row / group_size;
      const int head = field<kKvHead>() * group_size + row % group_size;
      return static_cast<Element*>(args.output) + token * args.output_token_stride +
             head * value_head_dim;
    }

    static __device__ __forceinline__ void store_word(unsigned address, uint32_t word) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
    }

    static __device__ __forceinline__ uint4 load_words(unsigned address) {
      uint4 words;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(address)
                   : "memory");
      return words;
    }

    __device__ __forceinline__ void run() {
      while (true) {
        wait_barrier(query_ready(base, query.stage), query.parity);
        if (field<kKvHead>() < 0) return;
        Outputs outputs;
        const bool has_outputs = attend(outputs);
        if constexpr (is_split) {
          store_partial(outputs, has_outputs);
          merge();
        } else {
          if (has_outputs) store(outputs);
        }
        if (is_lane_0()) arrive(query_free(base, query.stage));
        query.advance();
      }
    }

    // ---- split tiles

    // This block's outputs, not normalised, and for each row the reference and the sum.
    __device__ __forceinline__ void store_partial(const Outputs& outputs, bool has_outputs) {
      sync_threads(kConsumerBarrier, 256);  // nobody reads keys and values any more
      const int thread = thread_here(), lane = thread & 31, warp_row = (thread / 32 & 3) * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warpgroup * 64 + warp_row + lane / 4 + half * 8;
        const float sum = has_outputs ? sum_of_quad(softmax.sum[half]) : 0.f;
        if ((lane & 3) == 0) {
          store_pair(base + kStatsAt + row * 8, softmax.exponent(half), sum);
        }
        if (!has_outputs) continue;
        const unsigned at = base + kKeysAt + row * kPartialStride + (lane & 3) * 8;
#pragma unroll
        for (int column = 0; column < value_head_dim / 8; ++column) {
          store_pair(at + column * 32, outputs[4 * column + 2 * half],
                     outputs[4 * column + 2 * half + 1]);
        }
      }
    }

    static __device__ __forceinline__ void store_pair(unsigned address, float low, float high) {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(low), "f"(high)
                   : "memory");
    }

    static __device__ __forceinline__ unsigned of_block(unsigned address, int32_t rank) {
      unsigned mapped;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
      return mapped;
    }

    static __device__ __forceinline__ float2 load_pair(unsigned address) {
      float2 pair;
      asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                   : "=f"(pair.x), "=f"(pair.y)
                   : "r"(address)
                   : "memory");
      return pair;
    }

    static __device__ __forceinline__ void sync_cluster() {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }

    // Each block of the cluster merges an equal share of the rows.
    __device__ __forceinline__ void merge() {
      __syncwarp();
      sync_cluster();
      const int32_t size = cluster_size(), kv_head = field<kKvHead>();
      const int thread = thread_here(), lane = thread & 31;
      const int warp = warpgroup * 4 + (thread / 32 & 3);
      for (int row = cluster_rank() * 8 + warp; row < field<kNumRows>(); row += size * 8) {
        const int head = kv_head * group_size + row % group_size;
        float top = args.sinks[head] * kLog2E, sum = 0.f;
        for (int32_t rank = 0; rank < size; ++rank) {
          const float2 stats = load_pair(of_block(base + kStatsAt + row * 8, rank));
          if (stats.y != 0.f) top = fmaxf(top, stats.x);
        }
        float total[value_head_dim / 32] = {};
        for (int32_t rank = 0; rank < size; ++rank) {
          const float2 stats = load_pair(of_block(base + kStatsAt + row * 8, rank));
          if (stats.y == 0.f) continue;  // saw nothing, and left no outputs
          const float weight = exp2_approx(stats.x - top);
          sum += weight * stats.y;
          const unsigned at = of_block(base + kKeysAt + row * kPartialStride + lane * 8, rank);
#pragma unroll
          for (int i = 0; i < value_head_dim / 64; ++i) {
            const float2 pair = load_pair(at + i * 256);
            total[2 * i] += weight * pair.x;
            total[2 * i + 1] += weight * pair.y;
          }
        }
        if (top != minus_infinity()) sum += exp2_approx(args.sinks[head] * kLog2E - top);
        const float factor = normaliser(sum, 1.f);
        uint32_t* out = reinterpret_cast<uint32_t*>(output_row(row)) + lane;
#pragma unroll
        for (int i = 0; i < value_head_dim / 64; ++i) {
          out[i * 32] = pack<Element>(total[2 * i] * factor, total[2 * i + 1] * factor);
        }
      }
      __syncwarp();
      sync_cluster();  // nobody leaves while its shared memory is read
    }
  };

  static __device__ __forceinline__ void run(const PrefillSm90Args& args, unsigned base) {
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
      const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
      if (warp == 0) {
        if (threadIdx.x == 0) {
          Copier copier = {args, base, keep_in_l2()};
          copier.run();
        }
      } else {
        clear_padding(args, threadIdx.x - 32);
        choose_and_load(args, base, threadIdx.x - 32);
      }
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
      Consumer consumer = {args, base, warpgroup - 1};
      const float scale = has_softcap ? args.softcap : args.softmax_scale;
      consumer.softmax.scale = scale * kLog2E;
      consumer.run();
    }
  }
};

template <class Element, int head_dim, int value_head_dim, int group_size, bool has_window,
          bool has_softcap, bool is_split>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_sm90(const __grid_constant__ PrefillSm90Args args) {
  using Block = PrefillSm90<Element, head_dim, value_head_dim, group_size, has_window, has_softcap,
                            is_split>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = (shared_address(shared) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch_map(&args.key_map);
    prefetch_map(&args.value_map);
    Block::init_barriers(base);
  }
  __syncthreads();
  wait_for_previous_kernel();
  Block::run(args, base);
}

}  // namespace paged_trt
