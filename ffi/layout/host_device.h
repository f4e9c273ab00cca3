// Marks of where code runs, empty when no CUDA compiler reads them.
#pragma once

#ifdef __CUDACC__
#define PURLIN_HD __host__ __device__  // plain arithmetic: host and devices
#define PURLIN_RANK __device__         // what a rank runs: a host thread or a CUDA thread
#else
#define PURLIN_HD
#define PURLIN_RANK
#endif
