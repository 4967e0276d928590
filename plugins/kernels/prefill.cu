// Entry point of the prefill kernels: name expressions pick the instances.
#include "prefill.cuh"
