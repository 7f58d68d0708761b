/* As much of the CUDA driver as pagedkv, cuda.bindings and cuda.core call. Memory of the GPU is memory of the host, copies
   are made at once, and a launch calls back. Built and loaded as libcuda.so.1 by test_bindings.py.

   A call without a current context, where the driver needs one, is CUDA_ERROR_INVALID_CONTEXT. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { SHARED_OPTIN = 97, MAJOR = 75, MINOR = 76, MEMORY_TYPE = 2, HOST = 1, PER_THREAD = 2 };

typedef struct {
    char name[256];
    int dynamic_bytes;
} Kernel;

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    unsigned num_attributes;
} Config;

typedef int Launch(Kernel *kernel, const Config *config, void **arguments);

static Launch *launch;
static uintptr_t captured, pinned;
static __thread void *contexts[16];
static __thread int depth, mode;

/* For the test. */
void fake_on_launch(Launch *call) { launch = call; }
void fake_capture(uintptr_t stream) { captured = stream; }

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == MAJOR ? 9 : attribute == MINOR ? 0 : attribute == SHARED_OPTIN ? 232448 : 1;
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)0x1000, SUCCESS; }
int cuDevicePrimaryCtxRelease(int device) { return SUCCESS; }

int cuCtxGetCurrent(void **context) { return *context = depth ? contexts[depth - 1] : NULL, SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = 0, depth ? SUCCESS : INVALID_CONTEXT; }
int cuCtxSynchronize(void) { return depth ? SUCCESS : INVALID_CONTEXT; }
int cuCtxPushCurrent(void *context) { return contexts[depth++] = context, SUCCESS; }
int cuCtxPopCurrent(void **context) {
    if (!depth) return INVALID_CONTEXT;
    return *context = contexts[--depth], SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int *exchanged) {
    int before = mode;
    return mode = *exchanged, *exchanged = before, SUCCESS;
}
int cuStreamIsCapturing(void *stream, int *status) {
    if (stream == (void *)PER_THREAD && !depth) return INVALID_CONTEXT;
    return *status = captured && (uintptr_t)stream == captured, SUCCESS;
}
int cuStreamCreate(void **stream, unsigned flags) { return *stream = (void *)0x5000, depth ? SUCCESS : INVALID_CONTEXT; }
int cuStreamSynchronize(void *stream) { return SUCCESS; }
int cuEventCreate(void **event, unsigned flags) { return *event = (void *)0x6000, depth ? SUCCESS : INVALID_CONTEXT; }
int cuEventRecord(void *event, void *stream) { return SUCCESS; }
int cuEventSynchronize(void *event) { return SUCCESS; }

int cuMemAlloc(uint64_t *address, size_t nbytes) {
    if (!depth) return INVALID_CONTEXT;
    void *memory = aligned_alloc(256, (nbytes + 255) / 256 * 256);
    if (!memory) return OUT_OF_MEMORY;
    memset(memory, 0xA5, nbytes);
    return *address = (uint64_t)memory, SUCCESS;
}
int cuMemFree(uint64_t address) { return free((void *)address), SUCCESS; }
int cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags) {
    *memory = calloc(1, nbytes);
    return pinned = (uintptr_t)*memory, depth ? SUCCESS : INVALID_CONTEXT;
}
int cuPointerGetAttribute(unsigned *value, int attribute, uint64_t address) {
    if (attribute != MEMORY_TYPE || address != pinned) return INVALID_VALUE;
    return *value = HOST, SUCCESS;
}
int cuMemsetD8(uint64_t address, unsigned char byte, size_t n) { return memset((void *)address, byte, n), SUCCESS; }
int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t n, void *stream) { return cuMemsetD8(address, byte, n); }
int cuMemcpyDtoH(void *to, uint64_t from, size_t n) { return memcpy(to, (void *)from, n), SUCCESS; }
int cuMemcpyDtoHAsync(void *to, uint64_t from, size_t n, void *stream) { return cuMemcpyDtoH(to, from, n); }
int cuMemcpyHtoDAsync(uint64_t to, const void *from, size_t n, void *s) { return memcpy((void *)to, from, n), SUCCESS; }

int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    if (memcmp(code, "\177ELF", 4)) return INVALID_VALUE;
    return *library = (void *)0x7000, depth ? SUCCESS : INVALID_CONTEXT;
}
int cuLibraryUnload(void *library) { return SUCCESS; }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    Kernel *made = calloc(1, sizeof *made);
    strncpy(made->name, name, sizeof made->name - 1);
    return *kernel = made, SUCCESS;
}
int cuKernelSetAttribute(int attribute, int value, Kernel *kernel, int device) {
    return kernel->dynamic_bytes = value, SUCCESS;
}
int cuLaunchKernelEx(const Config *config, Kernel *kernel, void **arguments, void **extra) {
    if (!depth) return INVALID_CONTEXT;
    if (config->shared_bytes > kernel->dynamic_bytes || config->num_attributes || extra) return INVALID_VALUE;
    return launch(kernel, config, arguments);
}
