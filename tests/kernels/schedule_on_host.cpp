// Prints the pieces of every block of a batch, as decode_schedule.cuh makes them on the device.
//
// Input, as often as there is one: sharing_blocks grid columns window table_width num_seqs num_real,
// then num_seqs lengths before the step; sequences from num_real on are padding. Output: a line of
// "block sequence column first end first_block num_blocks index" per piece, then "done".
#include <cstdio>
#include <iostream>

#include "cuda_on_host.hpp"
#include "decode_schedule.cuh"

struct Batch {
  int num_seqs, window, table_width, num_blocks;
  const int* past_lens;
  const int* query_start_offsets;
};

int main() {
  static paged_trt::Schedule<Batch> schedule;
  int blocks, columns, num_real;
  Batch batch;
  while (std::cin >> batch.num_blocks >> blocks >> columns >> batch.window >> batch.table_width >> batch.num_seqs >>
         num_real) {
    std::vector<int> past(batch.num_seqs), offsets(batch.num_seqs + 1);
    for (int& length : past) std::cin >> length;
    for (int n = 0; n <= batch.num_seqs; n++) offsets[n] = std::min(n, num_real);
    batch.past_lens = past.data(), batch.query_start_offsets = offsets.data();
    gridDim = {static_cast<unsigned>(blocks), 1, 1};
    for (int block = 0; block < blocks; block++) {
      run_warp(block, [&] { schedule.begin(batch, columns); });
      threadIdx = {0, 0, 0}, blockIdx = {static_cast<unsigned>(block), 0, 0};
      for (int i = 0; schedule.piece(i).exists != 0; i++) {
        schedule.make(batch, i + 2);  // ahead of what is read, as in the kernel
        const paged_trt::Piece& piece = schedule.piece(i);
        std::printf("%d %d %d %d %d %d %d %d\n", block, piece.sequence, piece.column,
                    piece.keys.first, piece.keys.end, piece.first_block, piece.num_blocks,
                    piece.index);
      }
    }
    std::puts("done");
  }
}
