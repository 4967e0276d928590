// Forms of Hopper's prefill kernel that a plan may ask for by name: a macro of 1 takes one, and
// without any the kernel is what the planner takes by itself. They are here to be measured.
#pragma once

// Results are stored while the first scores of the next query tile run.
#ifndef PAGED_TRT_PREFILL_OVERLAP
#define PAGED_TRT_PREFILL_OVERLAP 0
#endif
// The last of an odd number of full key tiles takes the maximum of its scores, in place: so the
// product of the tile before runs beside its softmax, and none is waited for ahead of it.
#ifndef PAGED_TRT_PREFILL_SHORT_END
#define PAGED_TRT_PREFILL_SHORT_END 0
#endif
// Where heads are narrow, the scores of the next key tile run while those of this one become
// weights.
#ifndef PAGED_TRT_PREFILL_SCORES_AHEAD
#define PAGED_TRT_PREFILL_SCORES_AHEAD 0
#endif
// Sections of heads have half of the keys and values.
#ifndef PAGED_TRT_PREFILL_SMALL_SECTIONS
#define PAGED_TRT_PREFILL_SMALL_SECTIONS 0
#endif

namespace paged_trt {

constexpr bool kOverlapsTiles = PAGED_TRT_PREFILL_OVERLAP != 0;
constexpr bool kEndsShort = PAGED_TRT_PREFILL_SHORT_END != 0;
constexpr bool kScoresAhead = PAGED_TRT_PREFILL_SCORES_AHEAD != 0;
constexpr bool kHasSmallSections = PAGED_TRT_PREFILL_SMALL_SECTIONS != 0;

}  // namespace paged_trt
