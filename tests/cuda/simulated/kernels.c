/* Owns modules and kernels. A kernel is the function of its name in the library `$KVF_SIMULATED_CUDA_KERNELS`, built
   for the host: `void NAME(void *parameters)` for one thread of one block, `size_t NAME_params`, and the numbers of the
   thread and the block as thread-locals `kvf_thread_x`, `kvf_threads_x`, `kvf_block_x`, `kvf_blocks_x`. */

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "simulated.h"

struct module {
    void *library;
    bool unloaded;
};

struct function {
    struct function *next;
    struct module *module;
    void (*run)(void *parameters);
    size_t nbytes;
};

struct launch {
    struct work work;
    struct function *function;
    unsigned int blocks;
    unsigned int threads;
    uint64_t end;
    _Alignas(16) char parameters[];
};

static struct function *functions; /* under process.lock; never freed */

API CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    const char *path = getenv("KVF_SIMULATED_CUDA_KERNELS");
    if (image == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *module = calloc(1, sizeof **module);
    if (*module == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*module)->library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS || module == NULL || module->unloaded)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_HANDLE;
    char parameters[256] = "";
    strncat(parameters, name, sizeof parameters - 8);
    strcat(parameters, "_params");
    void *run = module->library != NULL ? dlsym(module->library, name) : NULL;
    const size_t *nbytes = run != NULL ? dlsym(module->library, parameters) : NULL;
    if (nbytes == NULL)
        return CUDA_ERROR_NOT_FOUND;
    struct function *found = calloc(1, sizeof *found);
    if (found == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    found->module = module;
    memcpy(&found->run, &run, sizeof run);
    found->nbytes = *nbytes;
    pthread_mutex_lock(&process.lock);
    found->next = functions;
    functions = found;
    pthread_mutex_unlock(&process.lock);
    *function = found;
    return CUDA_SUCCESS;
}

API CUresult cuModuleUnload(CUmodule module)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS || module == NULL || module->unloaded)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_HANDLE;
    module->unloaded = true; /* what was launched goes on */
    return CUDA_SUCCESS;
}

static void run_kernel(struct stream *stream, struct work *work)
{
    struct launch *launch = (struct launch *)work;
    void *library = launch->function->module->library;
    unsigned int *block = dlsym(library, "kvf_block_x"), *blocks = dlsym(library, "kvf_blocks_x");
    unsigned int *thread = dlsym(library, "kvf_thread_x"), *threads = dlsym(library, "kvf_threads_x");
    if (block == NULL || blocks == NULL || thread == NULL || threads == NULL)
        abort();
    *blocks = launch->blocks;
    *threads = launch->threads;
    uint64_t middle = (uint64_t)launch->blocks * launch->threads / 2;
    for (uint64_t at = 0; at < launch->end; at++) {
        if (at == middle && !faults_in_the_middle(stream_context(stream)->device))
            return;
        *block = (unsigned int)(at / launch->threads);
        *thread = (unsigned int)(at % launch->threads);
        launch->function->run(launch->parameters);
    }
}

API CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                            unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                            CUstream handle, void **parameters, void **extra)
{
    struct context *context;
    struct stream *stream;
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS)
        result = stream_of(handle, context, &stream);
    if (result == CUDA_SUCCESS)
        result = refused("cuLaunchKernel");
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    struct function *known = functions;
    while (known != NULL && known != function)
        known = known->next;
    pthread_mutex_unlock(&process.lock);
    if (known == NULL || known->module->unloaded)
        return CUDA_ERROR_INVALID_HANDLE;
    if (grid_x == 0 || block_x == 0 || block_x > 1024 || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 ||
        shared != 0 || parameters == NULL || extra != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct launch *launch = new_work(sizeof *launch + known->nbytes, run_kernel);
    launch->function = known;
    launch->blocks = grid_x;
    launch->threads = block_x;
    memcpy(launch->parameters, parameters[0], known->nbytes);
    bool fails = take_fault(COPY_FAILS, context->device);
    launch->end = (uint64_t)grid_x * block_x / (fails ? 2 : 1);
    if (refused("cuLaunchKernel, its bytes") != CUDA_SUCCESS)
        launch->end = 1; /* and nobody is told */
    __atomic_add_fetch(&process.table->kernels, 1, __ATOMIC_RELAXED);
    stream_add(stream, &launch->work);
    return fails ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
