// Prints the query blocks of a batch in the order in which Hopper's prefill takes them, and which
// tiles each of some thread blocks gets.
//
// Input, as often as there is one: num_seqs num_kv_heads token_bytes, then num_seqs + 1 offsets
// and num_seqs lengths before the step. Output: "num_blocks section_heads", a line of "sequence
// block" for each rank, then for the last ranks again in falling order, then "done"; a line of
// "block index" for each tile of the first key head that is dealt out, "done", and the same for two
// launches that take them from one counter.
#include <cstdio>
#include <iostream>

#include "cuda_on_host.hpp"
#include "prefill_sm90_tiles.cuh"

constexpr int kTileTokens = 32, kKeyTokens = 128;  // four heads for a key head

using Order = paged_trt::TileOrder<kTileTokens, kKeyTokens>;

// Thread blocks in turn, each with a tile at a time.
void print_tiles(const paged_trt::PrefillSm90Args& args, int num_blocks, int blocks) {
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  const Order order = {args, num_blocks};
  std::vector<bool> works(blocks, true);
  for (int round = 0; std::find(works.begin(), works.end(), true) != works.end(); round++) {
    for (int block = 0; block < blocks; block++) {
      if (!works[block]) continue;
      bool has_tile = false;
      run_warp(block, [&] {
        const int index = round == 0 ? block : order.next_index(round);
        if (threadIdx.x != 0) return;
        has_tile = index < order.num_tiles();
        if (has_tile) std::printf("%d %d\n", block, index);
      });
      works[block] = has_tile;
    }
  }
  std::puts("done");
}

int main() {
  int num_seqs, num_kv_heads;
  long long token_bytes;
  while (std::cin >> num_seqs >> num_kv_heads >> token_bytes) {
    std::vector<int> offsets(num_seqs + 1), past(num_seqs);
    for (int& offset : offsets) std::cin >> offset;
    for (int& length : past) std::cin >> length;
    paged_trt::PrefillSm90Args args = {};
    args.query_start_offsets = offsets.data(), args.past_lens = past.data();
    args.num_seqs = num_seqs, args.num_kv_heads = num_kv_heads;
    int num_blocks = 0;
    run_warp(0, [&] {
      Order order = {args};
      order.begin(token_bytes);
      if (threadIdx.x == 0) num_blocks = order.num_blocks;
      const bool prints = threadIdx.x == 0;
      if (prints) std::printf("%d %d\n", order.num_blocks, order.section_heads);
      const auto print = [&](int rank) {
        const paged_trt::QueryBlock found = order.find(rank);
        if (prints) std::printf("%d %d\n", found.sequence, found.block);
      };
      for (int rank = 0; rank < order.num_blocks; rank++) print(rank);
      for (int rank = order.num_blocks - 1; rank >= 0; rank -= 3) print(rank);
    });
    std::puts("done");
    constexpr int kBlocks = 7;
    args.num_kv_heads = 1;
    print_tiles(args, num_blocks, kBlocks);
    int counter = 0;
    args.tile_counter = &counter;
    for (int launch = 0; launch < 2; launch++) print_tiles(args, num_blocks, kBlocks);
  }
}
