// What gather.cu needs to be built for the host: one call is one thread of the grid, whose place is in thread-locals.
//
// c++ -x c++ -shared -fPIC -include host_kernel.h gather.cu: exports kvf_copy_N(parameters) and kvf_copy_N_params.
#include <cstddef>
#include <cstring>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline

extern "C" {
thread_local unsigned kvf_block_x, kvf_blocks_x, kvf_thread_x, kvf_threads_x;
}

struct kvf_place {
    unsigned x;
};
#define blockIdx (kvf_place{kvf_block_x})
#define gridDim (kvf_place{kvf_blocks_x})
#define threadIdx (kvf_place{kvf_thread_x})
#define blockDim (kvf_place{kvf_threads_x})

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

template <typename Word> static inline Word __ldcs(const Word *from)
{
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

template <typename Word> static inline void __stcs(Word *to, Word word)
{
    std::memcpy(to, &word, sizeof word);
}

#define KVF_KERNEL(size, word)                                                 \
    extern "C" const std::size_t kvf_copy_##size##_params = sizeof(kvf_batch); \
    extern "C" void kvf_copy_##size(const void *parameters)                    \
    {                                                                          \
        kvf_copy<word>(*static_cast<const kvf_batch *>(parameters));           \
    }
