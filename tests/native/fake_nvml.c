/* An NVML whose machine is described by environment variables.  tests/native/build.py writes them.
 *
 * FAKE_NVML          records separated by ';', each of key=value fields separated by '|'; %XX is a raw byte
 *                    uuid name mib cap=9.0 pci=domain.bus.device (hexadecimal) mig=1 slots sms
 *                    parent gi ci slot: a MIG instance of the parent-th record that is a GPU
 *                    rc.CALL: the code which that call returns for this record (handle uuid name cap pci mem ...)
 * FAKE_NVML_INIT     what nvmlInitWithFlags returns; FAKE_NVML_COUNT what nvmlDeviceGetCount returns,
 *                    FAKE_NVML_EVENT_SET what nvmlEventSetCreate returns
 * FAKE_NVML_ALIVE    after so many queries of devices every later one returns 999
 * FAKE_NVML_DRIVER, FAKE_NVML_CUDA (13000), FAKE_NVML_CUDA_RC
 * FAKE_NVML_USAGE    a file that is read for each query: lines "uuid used-MiB reserved-MiB pid:MiB pid:- ..." of what
 *                    is in use now ("-": not told); a device that has none is empty
 * FAKE_NVML_EVENTS   a file of events, which may grow: a line for each, `GPU TYPE DATA GI`: number, bits, Xid, instance (-1)
 *                    rc.events is what registering for them returns, events=BITS what a GPU supports (8)
 * FAKE_NVML_LOG      a file that gets a line for each init and shutdown
 *
 * With -DOLD the functions that newer drivers brought are missing.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;

enum {
    OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, UNKNOWN = 999, MAX = 256
};

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static void note(const char *line) {
    const char *path = getenv("FAKE_NVML_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "%s\n", line); fclose(file); }
}

static const char *record(int number) {
    const char *at = setting("FAKE_NVML", "");
    for (; *at && number > 0; number--) {
        at = strchr(at, ';');
        if (!at) return NULL;
        at++;
    }
    return *at ? at : NULL;
}

/* The value of a field of a record, with %XX decoded, in a buffer of MAX bytes; NULL where it has none. */
static char *field(int number, const char *key, char *out) {
    const char *at = record(number);
    size_t length = strlen(key), used = 0;
    while (at) {
        if (!strncmp(at, key, length) && at[length] == '=') break;
        at += strcspn(at, "|;");
        at = *at == '|' ? at + 1 : NULL;
    }
    if (!at) return NULL;
    for (at += length + 1; *at && *at != '|' && *at != ';' && used < MAX - 1; at++) {
        uint byte;
        if (*at == '%' && sscanf(at + 1, "%2x", &byte) == 1) { out[used++] = (char)byte; at += 2; }
        else out[used++] = *at;
    }
    out[used] = 0;
    return out;
}

static long number_of(int record_number, const char *key, long otherwise) {
    char text[MAX];
    return field(record_number, key, text) ? atol(text) : otherwise;
}

static int code_of(int record_number, const char *call) {
    static int asked;
    char key[64];
    if (getenv("FAKE_NVML_ALIVE") && ++asked > atoi(getenv("FAKE_NVML_ALIVE"))) return UNKNOWN;
    snprintf(key, sizeof key, "rc.%s", call);
    return (int)number_of(record_number, key, OK);
}

static int is_instance(int record_number) { return number_of(record_number, "parent", -1) >= 0; }

/* The record of the index-th GPU; -1 where there are fewer. */
static int gpu(uint index) {
    for (int i = 0; record(i); i++)
        if (!is_instance(i) && index-- == 0) return i;
    return -1;
}

/* Handles are records, counted from 1. */
#define RECORD ((int)(long)handle - 1)
#define CHECK(call) do { int code_ = code_of(RECORD, call); if (code_) return code_; } while (0)

static int text_field(void *handle, const char *key, char *out, uint length) {
    char text[MAX];
    CHECK(key);
    if (!field(RECORD, key, text)) return NOT_SUPPORTED;
    snprintf(out, length, "%s", text);
    return OK;
}

int nvmlInitWithFlags(uint flags) { (void)flags; note("init"); return atoi(setting("FAKE_NVML_INIT", "0")); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { note("shutdown"); return OK; }
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }

int nvmlSystemGetDriverVersion(char *out, uint length) {
    snprintf(out, length, "%s", setting("FAKE_NVML_DRIVER", "580.159.04"));
    return OK;
}

static int cuda_version(int *out) {
    *out = atoi(setting("FAKE_NVML_CUDA", "13000"));
    return atoi(setting("FAKE_NVML_CUDA_RC", "0"));
}
int nvmlSystemGetCudaDriverVersion(int *out) { return cuda_version(out); }

int nvmlDeviceGetCount_v2(uint *count) {
    for (*count = 0; gpu(*count) >= 0; ++*count) {}
    return atoi(setting("FAKE_NVML_COUNT", "0"));
}

int nvmlDeviceGetHandleByIndex_v2(uint index, void **out) {
    int found = gpu(index);
    if (found < 0) return INVALID;
    *out = (void *)(long)(found + 1);
    return code_of(found, "handle");
}

int nvmlDeviceGetUUID(void *handle, char *out, uint length) { return text_field(handle, "uuid", out, length); }
int nvmlDeviceGetName(void *handle, char *out, uint length) { return text_field(handle, "name", out, length); }

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    char text[MAX];
    CHECK("cap");
    if (!field(RECORD, "cap", text)) return NOT_SUPPORTED;
    return sscanf(text, "%d.%d", major, minor) == 2 ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    char text[MAX];
    for (int i = 0; record(i); i++) {
        if (!field(i, "uuid", text) || strcmp(text, uuid)) continue;
        *out = (void *)(long)(i + 1);
        return code_of(i, "handle");
    }
    return NOT_FOUND;
}

/* The rest of a device's line of FAKE_NVML_USAGE, in a buffer; empty where it has none. */
static char *usage(int record_number, char *line, int size) {
    char uuid[MAX];
    const char *path = getenv("FAKE_NVML_USAGE");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t length;
    if (file && field(record_number, "uuid", uuid)) {
        length = strlen(uuid);
        while (fgets(line, size, file))
            if (!strncmp(line, uuid, length) && line[length] == ' ') { fclose(file); return line + length; }
    }
    if (file) fclose(file);
    line[0] = 0;
    return line;
}

struct memory_v1 { ull total, free, used; };
int nvmlDeviceGetMemoryInfo(void *handle, struct memory_v1 *out) {
    char line[4096];
    ull used = 0, reserved = 0;
    CHECK("mem");
    sscanf(usage(RECORD, line, sizeof line), "%llu %llu", &used, &reserved);
    out->total = (ull)number_of(RECORD, "mib", 0) << 20;
    out->used = (used + reserved) << 20;
    out->free = out->total - out->used;
    return OK;
}

struct process { uint pid; ull used; uint gi, ci; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, uint *count, struct process *out) {
    char line[4096], *word, *rest;
    uint found = 0;
    CHECK("processes");
    strtok_r(usage(RECORD, line, sizeof line), " \n", &rest);
    strtok_r(NULL, " \n", &rest);
    while ((word = strtok_r(NULL, " \n", &rest))) {
        char *size = strchr(word, ':');
        if (out && found < *count) {
            memset(&out[found], 0, sizeof *out);
            out[found].pid = (uint)atol(word);
            out[found].used = !size || size[1] == '-' ? ~0ull : (ull)atol(size + 1) << 20;
        }
        found++;
    }
    if (found && (!out || found > *count)) { *count = found; return INSUFFICIENT_SIZE; }
    *count = found;
    return OK;
}

struct pci { char legacy[16]; uint domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *out) {
    char text[MAX];
    memset(out, 0, sizeof *out);
    CHECK("pci");
    if (!field(RECORD, "pci", text)) return NOT_SUPPORTED;
    if (sscanf(text, "%x.%x.%x", &out->domain, &out->bus, &out->device) != 3) return UNKNOWN;
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
    return OK;
}

#ifndef OLD
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return cuda_version(out); }

struct memory_v2 { uint version; ull total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out) {
    CHECK("mem2");
    CHECK("mem");
    if (out->version != 0x02000028) return 25;
    char line[4096];
    ull used = 0, reserved = 0;
    sscanf(usage(RECORD, line, sizeof line), "%llu %llu", &used, &reserved);
    out->total = (ull)number_of(RECORD, "mib", 0) << 20;
    out->reserved = reserved << 20;
    out->used = used << 20;
    out->free = out->total - out->used - out->reserved;
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, uint *current, uint *pending) {
    CHECK("mig");
    *current = *pending = (uint)number_of(RECORD, "mig", -1);
    return (int)*current < 0 ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, uint *out) {
    CHECK("slots");
    *out = (uint)number_of(RECORD, "slots", 7);
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, uint slot, void **out) {
    for (int i = 0; record(i); i++) {
        if (!is_instance(i) || gpu((uint)number_of(i, "parent", 0)) != RECORD) continue;
        if (number_of(i, "slot", 0) != (long)slot) continue;
        *out = (void *)(long)(i + 1);
        return code_of(i, "handle");
    }
    return NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(void *handle, uint *out) {
    CHECK("gi");
    *out = (uint)number_of(RECORD, "gi", 0);
    return is_instance(RECORD) ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeInstanceId(void *handle, uint *out) {
    CHECK("ci");
    *out = (uint)number_of(RECORD, "ci", 0);
    return is_instance(RECORD) ? OK : NOT_SUPPORTED;
}

static ull listening;      /* a bit for each record whose events are asked for */
static long events_read;   /* bytes of the file */

int nvmlEventSetCreate(void **out) {
    int code = atoi(setting("FAKE_NVML_EVENT_SET", "0"));
    *out = &listening;
    if (!code) note("listen");
    return code;
}
int nvmlEventSetFree(void *set) { (void)set; note("unlisten"); listening = 0; return OK; }

int nvmlDeviceGetSupportedEventTypes(void *handle, ull *out) {
    CHECK("event_types");
    *out = (ull)number_of(RECORD, "events", 8);
    return OK;
}

int nvmlDeviceRegisterEvents(void *handle, ull types, void *set) {
    CHECK("events");
    if (set != &listening || is_instance(RECORD) || !(types & (ull)number_of(RECORD, "events", 8))) return INVALID;
    listening |= 1ull << RECORD;
    return OK;
}

struct event { void *device; ull type, data; uint gpu_instance, compute_instance; };
int nvmlEventSetWait_v2(void *set, struct event *out, uint milliseconds) {
    int number, instance, found = 0;
    ull type, data;
    FILE *file = fopen(setting("FAKE_NVML_EVENTS", "/dev/null"), "r");
    (void)set; (void)milliseconds;
    if (!file) return TIMEOUT;
    fseek(file, events_read, SEEK_SET);
    while (!found && fscanf(file, "%d %llu %llu %d\n", &number, &type, &data, &instance) == 4) {
        events_read = ftell(file);
        if (gpu((uint)number) < 0 || !(listening >> gpu((uint)number) & 1)) continue;
        *out = (struct event){(void *)(long)(gpu((uint)number) + 1), type, data, (uint)instance, (uint)instance};
        found = 1;
    }
    fclose(file);
    return found ? OK : TIMEOUT;
}

struct attributes { uint multiprocessors, engines[5], gpu_slices, compute_slices; ull mib; };
int nvmlDeviceGetAttributes_v2(void *handle, struct attributes *out) {
    memset(out, 0, sizeof *out);
    CHECK("sms");
    out->multiprocessors = (uint)number_of(RECORD, "sms", 0);
    return is_instance(RECORD) ? OK : NOT_SUPPORTED;
}
#endif
