// Row-major tiles of 16-byte chunks in shared memory that ldmatrix reads without bank conflicts.
#pragma once

namespace paged_trt {

// Eight rows that one ldmatrix phase reads must lie in eight different 16-byte bank groups. With
// a multiple of eight chunks a row the chunk index is mixed with the row (no space lost); else
// rows are padded to an odd number of chunks, since mixing would leave the row.
template <int row_bytes>
struct SharedTile {
  static_assert(row_bytes % 16 == 0, "a row is a whole number of chunks");
  static constexpr int kChunks = row_bytes / 16;
  static constexpr bool kMixed = kChunks % 8 == 0;
  static constexpr int kStride = kMixed ? row_bytes : (kChunks | 1) * 16;

  // Byte offset of a chunk.
  static __device__ __forceinline__ unsigned offset(unsigned row, unsigned chunk) {
    return row * kStride + ((kMixed ? chunk ^ (row & 7) : chunk) << 4);
  }

  // What one lane adds to a tile's address to point at its own row of a matrix. The rest of an
  // address is known at compile time: one XOR, since a mixed tile lies at a multiple of 128 bytes
  // and so do its rows, and an immediate offset.
  struct Lane {
    unsigned offset_of_lane;

    __device__ __forceinline__ Lane(unsigned row, unsigned chunk)
        : offset_of_lane(offset(row, chunk)) {}

    // `row` is a multiple of 8, and `chunk` has no bit in common with the lane's own.
    __device__ __forceinline__ unsigned address(unsigned tile, unsigned row, unsigned chunk) const {
      const unsigned own = tile + offset_of_lane;
      return kMixed ? (own ^ (chunk & 7) << 4) + row * kStride + (chunk & ~7u) * 16
                    : own + row * kStride + chunk * 16;
    }
  };
};

}  // namespace paged_trt
