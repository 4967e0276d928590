// Prints the query blocks of a batch in the order in which Hopper's prefill takes them.
//
// Input, as often as there is one: num_seqs num_kv_heads token_bytes, then num_seqs + 1 offsets
// and num_seqs lengths before the step. Output: "num_blocks section_heads", a line of "sequence
// block" for each rank, then for the last ranks again in falling order, then "done".
#include <cstdio>
#include <iostream>

#include "cuda_on_host.hpp"
#include "prefill_sm90_tiles.cuh"

constexpr int kTileTokens = 32, kKeyTokens = 128;  // four heads for a key head

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
    run_warp(0, [&] {
      paged_trt::TileOrder<kTileTokens, kKeyTokens> order = {args};
      order.begin(token_bytes);
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
  }
}
