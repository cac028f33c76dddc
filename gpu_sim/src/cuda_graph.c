/* Graphs of the simulated CUDA driver, as far as they are about memory: nodes that allocate and free, recorded or
 * added, with their memory in the device's pool for graphs; and what streams record besides. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda.h"

enum node_type {
    NODE_KERNEL = 0,
    NODE_COPY = 1,
    NODE_FILL = 2,
    NODE_HOST = 3,
    NODE_GRAPH = 4,
    NODE_EMPTY = 5,
    NODE_ALLOC = 10,
    NODE_FREE = 11
};

typedef struct {
    CUmemPoolProps poolProps;
    const void *accessDescs;
    size_t accessDescCount, bytesize;
    CUdeviceptr address;
} CUmemAllocNodeParams;

/* What a graph allocates has one address for all its launches. */
struct graph_memory {
    CUdeviceptr address;
    size_t size;
    CUdevice device;
    CUmemLocation where; /* as it was asked for */
    bool held;           /* between launch and free */
    struct graph_memory *next;
};

typedef struct cu_node {
    enum node_type type;
    struct graph_memory *memory;
    struct cu_graph *graph; /* within this one */
    struct cuda_work work;
    struct cu_node *next;
} *CUgraphNode;

typedef struct cu_graph {
    CUgraphNode first, *end;
} *CUgraph;

typedef struct cu_graph_exec {
    size_t count;
    bool free_on_launch;
    struct {
        enum node_type type;
        struct graph_memory *memory;
        struct cuda_work work;
    } nodes[];
} *CUgraphExec;

#ifdef GRAPHS_WITHOUT_RECORDING
#define DO(STREAM, WORK) ((void)(STREAM), CUDA_SUCCESS) /* nothing else is in them */
#else
#define DO(STREAM, WORK) do_in(STREAM, WORK)
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct graph_memory *all; /* lives as long as the process, like the addresses */

/* ---- making graphs ---- */

CU(cuGraphCreate, CUgraph *graph, unsigned int flags)
{
    if (graph == NULL || flags != 0 || rt_ready() != RT_OK) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *graph = calloc(1, sizeof **graph);
    if (*graph == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    (*graph)->end = &(*graph)->first;
    return CUDA_SUCCESS;
}

CU(cuGraphDestroy, CUgraph graph)
{
    if (graph == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (CUgraphNode node = graph->first, next; node != NULL; node = next) {
        next = node->next;
        free(node);
    }
    free(graph);
    return CUDA_SUCCESS;
}

static CUresult add_node(CUgraph graph, enum node_type type, struct graph_memory *memory, CUgraphNode *made)
{
    CUgraphNode node = graph != NULL ? calloc(1, sizeof *node) : NULL;
    if (node == NULL) {
        return graph == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *node = (struct cu_node){.type = type, .memory = memory};
    *graph->end = node;
    graph->end = &node->next;
    if (made != NULL) {
        *made = node;
    }
    return CUDA_SUCCESS;
}

static CUresult add_alloc(CUgraph graph, CUmemLocation where, size_t size, CUdeviceptr *address, CUgraphNode *made)
{
    CUdevice device = cuda_device_at(&where);
    if (graph == NULL || size == 0 || size > (size_t)1 << 46 || rt_graph_pool(device) == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct graph_memory *memory = calloc(1, sizeof *memory);
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == NULL || start == MAP_FAILED) {
        free(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&lock);
    *memory =
        (struct graph_memory){.address = (uintptr_t)start, .size = size, .device = device, .where = where, .next = all};
    all = memory;
    pthread_mutex_unlock(&lock);
    *address = memory->address;
    return add_node(graph, NODE_ALLOC, memory, made);
}

static struct graph_memory *memory_at(CUdeviceptr address)
{
    struct graph_memory *memory = all;
    while (memory != NULL && memory->address != address) {
        memory = memory->next;
    }
    return memory;
}

static CUresult add_free(CUgraph graph, CUdeviceptr address, CUgraphNode *made)
{
    pthread_mutex_lock(&lock);
    struct graph_memory *memory = memory_at(address);
    pthread_mutex_unlock(&lock);
    return memory != NULL ? add_node(graph, NODE_FREE, memory, made) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuGraphAddMemAllocNode, CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count,
   CUmemAllocNodeParams *parameters)
{
    (void)needs;
    (void)count;
    return parameters != NULL
               ? add_alloc(graph, parameters->poolProps.location, parameters->bytesize, &parameters->address, node)
               : CUDA_ERROR_INVALID_VALUE;
}

CU(cuGraphAddMemFreeNode, CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count, CUdeviceptr address)
{
    (void)needs;
    (void)count;
    return add_free(graph, address, node);
}

CU(cuGraphAddEmptyNode, CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count)
{
    (void)needs;
    (void)count;
    return add_node(graph, NODE_EMPTY, NULL, node);
}

/* The driver clones what it is given; here the program must keep it. */
CU(cuGraphAddChildGraphNode, CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count, CUgraph child)
{
    CUgraphNode made;
    (void)needs;
    (void)count;
    CUresult result =
        child != NULL && child != graph ? add_node(graph, NODE_GRAPH, NULL, &made) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        made->graph = child;
        if (node != NULL) {
            *node = made;
        }
    }
    return result;
}

CU(cuGraphChildGraphNodeGetGraph, CUgraphNode node, CUgraph *graph)
{
    if (node == NULL || graph == NULL || node->type != NODE_GRAPH) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *graph = node->graph;
    return CUDA_SUCCESS;
}

CU(cuGraphGetNodes, CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    if (graph == NULL || count == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t found = 0;
    for (CUgraphNode node = graph->first; node != NULL; node = node->next, found++) {
        if (nodes != NULL && found < *count) {
            nodes[found] = node;
        }
    }
    *count = nodes == NULL || found < *count ? found : *count;
    return CUDA_SUCCESS;
}

CU(cuGraphNodeGetType, CUgraphNode node, int *type)
{
    if (node == NULL || type == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *type = node->type;
    return CUDA_SUCCESS;
}

CU(cuGraphMemAllocNodeGetParams, CUgraphNode node, CUmemAllocNodeParams *parameters)
{
    if (node == NULL || parameters == NULL || node->type != NODE_ALLOC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *parameters = (CUmemAllocNodeParams){.poolProps = {.allocType = 1, .location = node->memory->where},
                                         .bytesize = node->memory->size,
                                         .address = node->memory->address};
    return CUDA_SUCCESS;
}

/* ---- recording a stream ---- */

#ifndef GRAPHS_WITHOUT_RECORDING

CU(cuStreamBeginCapture_v2, CUstream stream, int mode)
{
    (void)mode;
    if ((uintptr_t)stream <= 2 || cuda_recording(stream) != NULL) { /* the default stream cannot be recorded */
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    return cuGraphCreate(&stream->capture, 0);
}

CU(cuStreamEndCapture, CUstream stream, CUgraph *graph)
{
    if ((uintptr_t)stream <= 2 || graph == NULL || stream->capture == NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    *graph = stream->capture;
    stream->capture = NULL;
    return CUDA_SUCCESS;
}

CU(cuStreamIsCapturing, CUstream stream, int *status)
{
    if (status == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *status = (uintptr_t)stream > 2 && stream->capture != NULL;
    return CUDA_SUCCESS;
}

static void capture_info(CUstream stream, int *status, uint64_t *id, CUgraph *graph)
{
    CUgraph recorded = cuda_recording(stream);
    if (id != NULL) {
        *id = (uintptr_t)recorded;
    }
    if (graph != NULL) {
        *graph = recorded;
    }
    *status = recorded != NULL;
}

CU(cuStreamGetCaptureInfo, CUstream stream, int *status, uint64_t *id)
{
    if (status == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    capture_info(stream, status, id, NULL);
    return CUDA_SUCCESS;
}

/* Nodes run in the order in which they were added, so that none depends on another. */
CU(cuStreamGetCaptureInfo_v2, CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **needs,
   size_t *count)
{
    if (needs != NULL) {
        *needs = NULL;
    }
    if (count != NULL) {
        *count = 0;
    }
    if (status == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    capture_info(stream, status, id, graph);
    return CUDA_SUCCESS;
}

CU(cuStreamGetCaptureInfo_v3, CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **needs,
   const void **edges, size_t *count)
{
    if (edges != NULL) {
        *edges = NULL;
    }
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, needs, count);
}

CU(cuThreadExchangeStreamCaptureMode, int *mode)
{
    static _Thread_local int current;
    if (mode == NULL || *mode < 0 || *mode > 2) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int before = current;
    current = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuda_graph_capture_work(CUgraph graph, const struct cuda_work *work)
{
    static const enum node_type types[] = {
        [CUDA_KERNEL] = NODE_KERNEL, [CUDA_COPY] = NODE_COPY, [CUDA_FILL] = NODE_FILL, [CUDA_CALL] = NODE_HOST};
    CUgraphNode made;
    CUresult result = add_node(graph, types[work->kind], NULL, &made);
    if (result == CUDA_SUCCESS) {
        made->work = *work;
    }
    return result;
}

CUresult cuda_graph_capture_alloc(CUgraph graph, CUdevice device, CUdeviceptr *address, size_t size)
{
    return address != NULL ? add_alloc(graph, (CUmemLocation){CU_ON_DEVICE, device}, size, address, NULL)
                           : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuda_graph_capture_free(CUgraph graph, CUdeviceptr address)
{
    return add_free(graph, address, NULL);
}

#endif

/* ---- running them ---- */

/* All nodes, those of graphs within in their place; `made` may be NULL to count. */
static size_t flatten(CUgraph graph, CUgraphExec made, size_t count)
{
    for (CUgraphNode node = graph->first; node != NULL; node = node->next) {
        if (node->type == NODE_GRAPH) {
            count = flatten(node->graph, made, count);
            continue;
        }
        if (made != NULL) {
            made->nodes[count].type = node->type;
            made->nodes[count].memory = node->memory;
            made->nodes[count].work = node->work;
        }
        count++;
    }
    return count;
}

static CUresult instantiate(CUgraphExec *executable, CUgraph graph, unsigned long long flags)
{
    enum { AUTO_FREE_ON_LAUNCH = 1 };
    if (executable == NULL || graph == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t count = flatten(graph, NULL, 0);
    CUgraphExec made = calloc(1, sizeof *made + count * sizeof *made->nodes);
    if (made == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->free_on_launch = (flags & AUTO_FREE_ON_LAUNCH) != 0;
    made->count = flatten(graph, made, 0);
    *executable = made;
    return CUDA_SUCCESS;
}

CU(cuGraphInstantiate_v2, CUgraphExec *executable, CUgraph graph, CUgraphNode *node, char *text, size_t size)
{
    (void)node;
    (void)text;
    (void)size;
    return instantiate(executable, graph, 0);
}

ALIAS(cuGraphInstantiate, cuGraphInstantiate_v2, (executable, graph, node, text, size), CUgraphExec *executable,
      CUgraph graph, CUgraphNode *node, char *text, size_t size)

CU(cuGraphInstantiateWithFlags, CUgraphExec *executable, CUgraph graph, unsigned long long flags)
{
    return instantiate(executable, graph, flags);
}

CU(cuGraphInstantiateWithParams, CUgraphExec *executable, CUgraph graph, const unsigned long long *parameters)
{
    return parameters != NULL ? instantiate(executable, graph, parameters[0]) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuGraphExecDestroy, CUgraphExec executable)
{
    free(executable);
    return executable != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#ifndef GRAPHS_WITHOUT_RECORDING
static CUresult do_in(CUstream stream, const struct cuda_work *work)
{
    CUcontext context;
    CUresult result = cuda_context(&context);
    return result == CUDA_SUCCESS ? cuda_do(context, stream, work) : result;
}
#endif

/* The lock is held here and below. */
static void let_go(struct graph_memory *memory)
{
    memory->held = false;
    madvise((void *)(uintptr_t)memory->address, memory->size, MADV_DONTNEED);
    rt_pool_unuse(rt_graph_pool(memory->device), memory->size);
}

static CUresult run(CUgraphExec executable, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    size_t done = 0;
    for (size_t i = 0; i < executable->count; i++) {
        struct graph_memory *memory = executable->nodes[i].memory;
        if (memory != NULL && executable->nodes[i].type == NODE_ALLOC && memory->held && executable->free_on_launch) {
            let_go(memory);
        }
    }
    for (; done < executable->count && result == CUDA_SUCCESS; done++) {
        struct graph_memory *memory = executable->nodes[done].memory;
        if (executable->nodes[done].type == NODE_ALLOC) {
            result = memory->held ? CUDA_ERROR_INVALID_VALUE
                                  : result_of(rt_pool_use(rt_graph_pool(memory->device), memory->size));
            memory->held = memory->held || result == CUDA_SUCCESS;
        } else if (executable->nodes[done].type == NODE_FREE && memory->held) {
            let_go(memory);
        } else if (executable->nodes[done].type <= NODE_HOST) {
            result = DO(stream, &executable->nodes[done].work);
        }
    }
    for (size_t i = 0; result == CUDA_ERROR_OUT_OF_MEMORY && i + 1 < done; i++) {
        if (executable->nodes[i].type == NODE_ALLOC && executable->nodes[i].memory->held) {
            let_go(executable->nodes[i].memory); /* all or nothing */
        }
    }
    return result;
}

CU(cuGraphLaunch, CUgraphExec executable, CUstream stream)
{
    if (executable == NULL || rt_ready() != RT_OK) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    CUresult result = run(executable, stream);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Brings the memory without running: the pool keeps it for the launch. */
CU(cuGraphUpload, CUgraphExec executable, CUstream stream)
{
    CUresult result = cuGraphLaunch(executable, stream);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; result == CUDA_SUCCESS && i < executable->count; i++) {
        if (executable->nodes[i].type == NODE_ALLOC && executable->nodes[i].memory->held) {
            let_go(executable->nodes[i].memory);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

void cuda_graph_drop(CUdevice device)
{
    pthread_mutex_lock(&lock);
    for (struct graph_memory *memory = all; memory != NULL; memory = memory->next) {
        if (memory->device == device && memory->held) {
            let_go(memory);
        }
    }
    pthread_mutex_unlock(&lock);
    rt_pool_trim(rt_graph_pool(device), 0);
}

bool cuda_graph_free(CUdeviceptr address)
{
    pthread_mutex_lock(&lock);
    struct graph_memory *memory = memory_at(address);
    bool held = memory != NULL && memory->held;
    if (held) {
        let_go(memory);
    }
    pthread_mutex_unlock(&lock);
    return held;
}

/* ---- the pool for graphs ---- */

CU(cuDeviceGetGraphMemAttribute, CUdevice device, int attribute, void *value)
{
    struct rt_pool *pool = rt_graph_pool(device);
    if (pool == NULL || value == NULL || attribute < 0 || attribute > 3) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const uint64_t values[] = {pool->used, pool->used_high, pool->reserved, pool->reserved_high};
    memcpy(value, &values[attribute], sizeof *values);
    return CUDA_SUCCESS;
}

CU(cuDeviceGraphMemTrim, CUdevice device)
{
    struct rt_pool *pool = rt_graph_pool(device);
    return pool != NULL ? result_of(rt_pool_trim(pool, 0)) : CUDA_ERROR_INVALID_DEVICE;
}
