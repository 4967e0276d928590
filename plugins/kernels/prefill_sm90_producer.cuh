// What feeds the products of a Hopper prefill block: copies of keys and values, and query tiles.
#pragma once

#include "prefill_sm90_layout.cuh"
#include "prefill_sm90_tiles.cuh"

namespace paged_trt {

// Copies keys and values, a tile ahead of the products: one thread.
template <class Layout>
struct KeyValueCopier {
  const PrefillSm90Args& args;
  unsigned base;
  uint64_t policy;
  RingPlace<Layout::kKeyStages> keys;
  RingPlace<Layout::kValueStages> values;

  __device__ __forceinline__ void copy_keys(int32_t tile, int32_t head) {
    wait_barrier(Layout::key_free(base, keys.stage), keys.parity ^ 1);
    arrive_expecting(Layout::key_ready(base, keys.stage), Layout::kKeyBytes);
    const int32_t place[4] = {0, tile % (kTokensPerPage / Layout::kKeys) * Layout::kKeys, 0, head};
    copy_box(base + Layout::kKeysAt + keys.stage * Layout::kKeyBytes, &args.key_map,
             Layout::key_ready(base, keys.stage), place, policy);
    keys.advance();
  }

  __device__ __forceinline__ void copy_values(int32_t tile, int32_t head) {
    wait_barrier(Layout::value_free(base, values.stage), values.parity ^ 1);
    arrive_expecting(Layout::value_ready(base, values.stage), Layout::kValueBytes);
    const int32_t place[4] = {0, tile % (kTokensPerPage / Layout::kKeys) * Layout::kKeys, 0, head};
    copy_box(base + Layout::kValuesAt + values.stage * Layout::kValueBytes, &args.value_map,
             Layout::value_ready(base, values.stage), place, policy);
    values.advance();
  }

  // (page, head) as the maps count them; the first one beyond the pool for an invalid page.
  __device__ __forceinline__ int32_t place_of(const QueryWork& work, int32_t tile) const {
    const int32_t page = Layout::page_of(args, work.sequence, tile);
    return is_page(page, args.num_pages) ? page * args.num_kv_heads + work.kv_head
                                         : args.num_pages * args.num_kv_heads;
  }

  __device__ __forceinline__ void run() {
    RingPlace<Layout::kQueryStages> place;
    while (true) {
      wait_barrier(Layout::work_ready(base, place.stage), place.parity);
      const QueryWork work = Layout::read_work_early(base, place.stage);
      if (work.kv_head < 0) return;
      place.advance();
      if (Layout::kIsSplit && work.last < work.first) continue;
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

// Chooses query tiles and brings their rows: three warps, `thread` from 0.
template <class Layout>
struct QueryChooser {
  using Element = typename Layout::Type;
  using Order = TileOrder<Layout::kTokens, Layout::kKeys>;
  using Loader = QueryLoader<Element, Layout::kHeadDim, Layout::kGroup>;

  static __device__ __forceinline__ QueryWork find_work(const PrefillSm90Args& args, Order& order,
                                                        int32_t index) {
    QueryWork work = {0, 0, 0, -1, 0, 0, 0, 0};
    if (index >= order.num_tiles()) return work;
    const int32_t tiles = order.num_blocks * order.section_heads;
    const int32_t section = index / tiles, within = index - section * tiles;
    const int32_t first_head = section * order.section_heads;
    const int32_t heads = min(order.section_heads, args.num_kv_heads - first_head);
    const int32_t rank = within / heads;
    // The last section ends with its shortest tiles; those before alternate, so that where two
    // meet, tiles of one length do.
    const int32_t sections = (args.num_kv_heads - 1) / order.section_heads;
    const bool is_reversed = ((sections - section) & 1) != 0;
    const QueryBlock block = order.find(is_reversed ? order.num_blocks - 1 - rank : rank);
    const int32_t begin = args.query_start_offsets[block.sequence] + block.block * Layout::kTokens;
    const int32_t end = args.query_start_offsets[block.sequence + 1];
    const int32_t tokens = min(Layout::kTokens, end - begin);
    const int32_t past = args.past_lens[block.sequence];
    work.first_token = begin;
    work.num_rows = tokens * Layout::kGroup;
    work.position = past + block.block * Layout::kTokens;
    work.kv_head = first_head + within - rank * heads;
    work.last = (work.position + tokens - 1) / Layout::kKeys;
    work.first = Layout::kHasWindow ? first_visible(work.position, args.window) / Layout::kKeys : 0;
    work.sequence = block.sequence;
    const int32_t length = past + end - args.query_start_offsets[block.sequence];
    work.flags = length < (work.last + 1) * Layout::kKeys ? kHasDeadRows : 0;
    return work;
  }

  // Whether a key tile that some row sees has no page.
  static __device__ __forceinline__ bool has_invalid_pages(const PrefillSm90Args& args,
                                                           const QueryWork& work) {
    bool is_invalid = false;
    for (int32_t tile = work.first + (threadIdx.x & 31); tile <= work.last; tile += 32) {
      is_invalid |= !is_page(Layout::page_of(args, work.sequence, tile), args.num_pages);
    }
    return __any_sync(kAllLanes, is_invalid);
  }

  // This block's share of the keys of a split tile. It may be empty: `last` is below `first`.
  static __device__ __forceinline__ void take_share(QueryWork& work) {
    const int32_t size = Layout::cluster_size();
    const int32_t share = (work.last - work.first + size) / size;
    const int32_t last = work.last - Layout::cluster_rank() * share;
    if (Layout::cluster_rank() != 0) work.flags &= ~kHasDeadRows;
    work.first = max(work.first, last - share + 1);
    work.last = last;
  }

  static __device__ __forceinline__ void choose_and_load(const PrefillSm90Args& args, unsigned base,
                                                         int thread) {
    const bool chooses = thread < 32;
    Order order = {args};
    if (chooses) order.begin((Layout::kHeadDim + Layout::kValueDim) * 2);
    RingPlace<Layout::kQueryStages> place;
    for (int32_t round = 0;; ++round) {
      if (chooses) {
        wait_barrier(Layout::query_free(base, place.stage), place.parity ^ 1);
        QueryWork work = {0, 0, 0, -1, 0, 0, 0, 0};
        const int32_t index = round == 0         ? Layout::block_index()
                              : Layout::kIsSplit ? -1
                                                 : order.next_index(round);
        if (index >= 0) work = find_work(args, order, index);
        if (Layout::kIsSplit && work.kv_head >= 0) take_share(work);
        if (thread == 0) {
          Layout::write_work(base, place.stage, work);
          arrive(Layout::work_ready(base, place.stage));
        }
      }
      wait_barrier(Layout::work_ready(base, place.stage), place.parity);
      const QueryWork work = Layout::read_work_early(base, place.stage);
      if (work.kv_head >= 0) {
        Loader::start(args, base + place.stage * Layout::kQueryBytes, work.first_token,
                      work.num_rows, work.kv_head);
        // Only those who wait for the query need to know.
        if (chooses && has_invalid_pages(args, work) && thread == 0) {
          const int32_t flags = Layout::template work_field<kFlags>(base, place.stage);
          Layout::template write_field<kFlags>(base, place.stage, flags | kHasInvalidPages);
        }
        Loader::finish(args, base + place.stage * Layout::kQueryBytes, work.num_rows,
                       work.position);
      }
      arrive(Layout::query_ready(base, place.stage));
      if (work.kv_head < 0) return;
      place.advance();
    }
  }

  // Token rows after the last sequence.
  static __device__ __forceinline__ void clear_padding(const PrefillSm90Args& args, int thread) {
    const int32_t first = args.query_start_offsets[args.num_seqs];
    const int32_t chunks = args.num_kv_heads * (Layout::kGroup * Layout::kValueDim / 8);
    const int64_t count = int64_t{args.num_tokens - first} * chunks;
    for (int64_t i = int64_t{blockIdx.x} * kLoaderThreads + thread; i < count;
         i += int64_t{gridDim.x} * kLoaderThreads) {
      const int64_t token = first + i / chunks;
      Element* row = static_cast<Element*>(args.output) + token * args.output_token_stride;
      reinterpret_cast<uint4*>(row)[i % chunks] = make_uint4(0, 0, 0, 0);
    }
  }
};

}  // namespace paged_trt
