// Entry point of Hopper's prefill kernels: name expressions pick the instances.
#include "prefill_sm90.cuh"
