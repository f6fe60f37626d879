/* A CUDA driver whose devices are described by environment variables.  tests/native/build.py writes them.
 *
 * It honours nothing else: no mask and no order. A test sees from the log what it was given.
 *
 * FAKE_CUDA          records uuid|gpu uuid|name|MiB|major|minor|domain.bus.device (hexadecimal)|SMs|integrated,
 *                    separated by ';'; the UUIDs as hexadecimal digits with dashes, the second that of the whole GPU
 * FAKE_CUDA_INIT     what cuInit returns; "crash" and "hang" do so
 * FAKE_CUDA_VERSION  13000
 * FAKE_CUDA_LOG      a file that gets a line for each cuInit: the mask and the order, "unset" where unset
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NOT_INITIALIZED = 3, MAX = 256 };
enum { UUID, GPU_UUID, NAME, MIB, MAJOR, MINOR, PCI, SMS, INTEGRATED };

static int initialised;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

/* A field of a record, in a buffer of MAX bytes; NULL where there is none. */
static char *field(int device, int number, char *out) {
    const char *at = setting("FAKE_CUDA", "");
    for (; device > 0; device--) {
        at = strchr(at, ';');
        if (!at) return NULL;
        at++;
    }
    if (!*at) return NULL;
    for (; number > 0; number--) {
        at += strcspn(at, "|;");
        if (*at != '|') return NULL;
        at++;
    }
    size_t length = strcspn(at, "|;");
    if (length > MAX - 1) length = MAX - 1;
    memcpy(out, at, length);
    out[length] = 0;
    return out;
}

static long number_of(int device, int number) {
    char text[MAX];
    return field(device, number, text) ? atol(text) : 0;
}

int cuInit(unsigned flags) {
    const char *path = getenv("FAKE_CUDA_LOG"), *result = setting("FAKE_CUDA_INIT", "0");
    FILE *file = path ? fopen(path, "a") : NULL;
    (void)flags;
    if (file) {
        fprintf(file, "%s %s\n", setting("CUDA_VISIBLE_DEVICES", "unset"), setting("CUDA_DEVICE_ORDER", "unset"));
        fclose(file);
    }
    /* What a driver prints must not get into the answer. */
    printf("noise\n");
    fflush(stdout);
    if (!strcmp(result, "crash")) abort();
    if (!strcmp(result, "hang")) sleep(600);
    initialised = atoi(result) == 0;
    return atoi(result);
}

int cuDriverGetVersion(int *version) { *version = atoi(setting("FAKE_CUDA_VERSION", "13000")); return OK; }

int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : NULL;
    return *name ? OK : INVALID;
}

int cuDeviceGetCount(int *count) {
    char text[MAX];
    if (!initialised) return NOT_INITIALIZED;
    for (*count = 0; field(*count, UUID, text); ++*count) {}
    return OK;
}

int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }

int cuDeviceGetName(char *out, int length, int device) {
    char text[MAX];
    if (!field(device, NAME, text)) return INVALID;
    snprintf(out, (size_t)length, "%s", text);
    return OK;
}

static int uuid(unsigned char *out, int device, int number) {
    char text[MAX];
    unsigned byte;
    if (!field(device, number, text) || !*text) return INVALID;
    char *at = text;
    for (int i = 0; i < 16; i++, at += 2) {
        if (*at == '-') at++;
        if (sscanf(at, "%2x", &byte) != 1) return INVALID;
        out[i] = (unsigned char)byte;
    }
    return OK;
}

int cuDeviceGetUuid(unsigned char *out, int device) { return uuid(out, device, GPU_UUID); }
int cuDeviceGetUuid_v2(unsigned char *out, int device) { return uuid(out, device, UUID); }

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = (size_t)number_of(device, MIB) << 20;
    return OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    char text[MAX];
    int domain = 0, bus = 0, slot = 0;
    if (field(device, PCI, text)) sscanf(text, "%x.%x.%x", &domain, &bus, &slot);
    switch (attribute) {
        case 16: *value = (int)number_of(device, SMS); return OK;
        case 18: *value = (int)number_of(device, INTEGRATED); return OK;
        case 33: *value = bus; return OK;
        case 34: *value = slot; return OK;
        case 50: *value = domain; return OK;
        case 75: *value = (int)number_of(device, MAJOR); return OK;
        case 76: *value = (int)number_of(device, MINOR); return OK;
        default: return INVALID;
    }
}
