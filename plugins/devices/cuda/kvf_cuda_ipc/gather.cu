// The kernel that copies many small fragments between a GPU's memory and pinned host memory.
//
// A batch is a product (see `CopyBatch`): lanes x places x steps, each a run of `words` words. It comes whole as the one
// parameter, so that no memory has to outlive the launch. All threads go over the words of all fragments: neighbours
// copy neighbouring words, four each at a time, so that enough reads are under way to hide the bus.
// Built by NVRTC for the words of 1 to 16 bytes; tests build it for the host.

typedef unsigned long long u64;
typedef unsigned int u32;

#define KVF_PAIRS 240
#define KVF_STEPS 4
#define KVF_AT_ONCE 4

struct kvf_batch {
    u64 arena;                // where it is mapped on this GPU
    u32 lanes, places;
    u32 words;                // of one fragment
    u32 to_arena;
    u32 total;                // words of all fragments
    u32 numbers[KVF_STEPS];   // of the steps, outermost first; 1 for one that is not there
    u64 device_steps[KVF_STEPS]; // in bytes
    u64 arena_steps[KVF_STEPS];
    u64 addresses[KVF_PAIRS]; // lanes', then places'
    u64 offsets[KVF_PAIRS];
};

template <typename Word>
static __device__ __forceinline__ void kvf_find(const kvf_batch &batch, u32 index, const Word **from, Word **to)
{
    u32 fragment = index / batch.words;
    u64 device = (u64)(index - fragment * batch.words) * sizeof(Word);
    u64 host = batch.arena + device;
    for (int step = KVF_STEPS - 1; step >= 0; --step) {
        const u32 number = batch.numbers[step];
        if (number == 1)
            continue;
        const u32 at = fragment % number;
        fragment /= number;
        device += at * batch.device_steps[step];
        host += at * batch.arena_steps[step];
    }
    const u32 lane = fragment / batch.places;
    const u32 place = batch.lanes + (fragment - lane * batch.places);
    device += batch.addresses[lane] + batch.addresses[place];
    host += batch.offsets[lane] + batch.offsets[place];
    *from = (const Word *)(batch.to_arena ? device : host);
    *to = (Word *)(batch.to_arena ? host : device);
}

template <typename Word>
static __device__ __forceinline__ void kvf_copy(const kvf_batch &batch)
{
    const u32 threads = gridDim.x * blockDim.x;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    for (; index < batch.total; index += threads * KVF_AT_ONCE) {
        Word words[KVF_AT_ONCE];
        Word *to[KVF_AT_ONCE];
#pragma unroll
        for (u32 each = 0; each < KVF_AT_ONCE; ++each) {
            const u32 at = index + each * threads;
            if (at < batch.total) {
                const Word *from;
                kvf_find(batch, at, &from, &to[each]);
                words[each] = __ldcs(from);
            }
        }
#pragma unroll
        for (u32 each = 0; each < KVF_AT_ONCE; ++each)
            if (index + each * threads < batch.total)
                __stcs(to[each], words[each]);
    }
}

#ifndef KVF_KERNEL // a host build has its own
#define KVF_KERNEL(size, word)                                                       \
    extern "C" __global__ void kvf_copy_##size(const __grid_constant__ kvf_batch batch) \
    {                                                                                \
        kvf_copy<word>(batch);                                                       \
    }
#endif

KVF_KERNEL(1, unsigned char)
KVF_KERNEL(2, unsigned short)
KVF_KERNEL(4, unsigned int)
KVF_KERNEL(8, uint2)
KVF_KERNEL(16, uint4)
