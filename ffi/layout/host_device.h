// Marks of where code runs, empty or plain when no CUDA compiler reads them.
#pragma once

#ifdef __CUDACC__
#define PURLIN_HD __host__ __device__        // plain arithmetic: host and devices
#define PURLIN_RANK __device__               // what a rank runs: a host thread or a CUDA thread
#define PURLIN_COLD __device__ __noinline__  // the same, and rarely
#define PURLIN_ROLLED _Pragma("unroll 1")    // before a loop that is short: no code to fetch for it
#define PURLIN_UNROLLED _Pragma("unroll")
#define PURLIN_COLD_HD __host__ __device__ __noinline__
#else
#define PURLIN_HD
#define PURLIN_COLD_HD
#define PURLIN_RANK
#define PURLIN_COLD
#define PURLIN_ROLLED
#define PURLIN_UNROLLED
#endif
