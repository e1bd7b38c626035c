/* A CUDA driver without a device: Triton loads kernels with it and launches them, and nothing runs.
   A launch goes to a function of the test's. A tensor map keeps what it was made of. */
#include <stdint.h>
#include <string.h>

#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuCtxGetDevice)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxSetLimit)
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuDriverGetVersion)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuGetErrorString)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuStreamIsCapturing)
NOTHING(cuTensorMapEncodeIm2col)

static void (*record)(const void *config, void *function, void **arguments);
static uintptr_t handles;

void record_launches(void *function) { record = function; }

int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
  record(config, function, arguments);
  return 0;
}

int cuTensorMapEncodeTiled(
    uint64_t map[16], uint32_t type, uint32_t rank, void *address, const uint64_t *shape,
    const uint64_t *strides, const uint32_t *box, const uint32_t *steps, uint32_t interleave,
    uint32_t swizzle, uint32_t promotion, uint32_t fill) {
  memset(map, 0, 16 * sizeof *map);
  map[0] = (uintptr_t)address;
  map[1] = (uint64_t)type << 32 | rank;
  memcpy(map + 2, shape, rank * sizeof *shape);
  memcpy(map + 7, strides, (rank - 1) * sizeof *strides);
  memcpy(map + 11, box, rank * sizeof *box);
  map[14] = (uint64_t)interleave << 32 | swizzle;
  map[15] = (uint64_t)promotion << 32 | fill;
  return 0;
}

int cuModuleLoadData(void **module, const void *image) {
  *module = (void *)++handles;
  return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)++handles;
  return 0;
}

int cuDeviceGet(int *device, int number) {
  *device = number;
  return 0;
}

/* of an H200: bytes of shared memory (97), threads of a warp (10), multiprocessors (16) */
int cuDeviceGetAttribute(int *value, int name, int device) {
  *value = name == 97 ? 232448 : name == 10 ? 32 : name == 16 ? 132 : 1;
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}

int cuFuncGetAttribute(int *value, int name, void *function) {
  *value = name == 0 ? 1024 : 0; /* 0: the most threads of a block */
  return 0;
}

int cuPointerGetAttribute(uint64_t *value, int name, uint64_t pointer) {
  *value = pointer;
  return 0;
}

int cuPointerGetAttributes(unsigned count, const int *names, uint64_t **values, uint64_t pointer) {
  while (count--) *values[count] = pointer;
  return 0;
}
