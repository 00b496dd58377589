/* Graphs, their executables and user objects. An executable is a copy: nodes with their arguments,
 * edges, and a reference on every user object. A launch puts the nodes into its stream one
 * by one, in any order that their edges allow, so that other streams run in between, as on
 * hardware. */
#include "tests/softcuda/inside.h"

#include <stdlib.h>
#include <string.h>

struct CUgraphNode_st {
	CUgraph graph;         /* it is part of                              */
	size_t index;          /* position in it                             */
	struct sc_work *work;  /* owned                                      */
	struct sc_nodes after; /* nodes that must be done before             */
	bool mark;             /* of a walk over the graph                   */
};

struct CUuserObject_st {
	unsigned count;     /* references                                         */
	CUhostFn destroy;   /* called with data when there are none               */
	void *data;         /* of the program                                     */
	CUdeviceptr memory; /* owned instead: a captured allocation, or 0         */
	CUuserObject next;  /* list of all                                        */
};

/* References that a graph holds. */
struct retained {
	CUuserObject object;
	unsigned count;
};

/* A graph or an executable: the same content, different lives. */
struct CUgraph_st {
	CUgraphNode *nodes;       /* in order of capture                      */
	size_t count;             /* nodes                                    */
	struct retained *objects; /* references held                          */
	size_t object_count;      /* entries                                  */
	CUgraph next;             /* list of all graphs                       */
};

struct CUgraphExec_st {
	struct CUgraph_st *body; /* private copy                              */
	unsigned count;          /* the program's reference and queued launches */
	CUcontext context;       /* it was instantiated in                    */
	bool live;               /* not destroyed by the program              */
	CUgraphExec next;        /* list of all                               */
};

static CUgraph graphs;
static CUgraphExec executables;
static CUuserObject objects;

static void release(CUuserObject object, unsigned count)
{
	object->count -= count;
	if (object->count)
		return;
	if (object->memory)
		sc_memory_free(sc_memory_find(object->memory));
	else
		sc_later(object->destroy, object->data);
	CUuserObject *link = &objects;
	while (*link != object)
		link = &(*link)->next;
	*link = object->next;
	free(object);
}

static CUuserObject make_object(unsigned count)
{
	CUuserObject object = sc_alloc(sizeof *object);
	*object = (struct CUuserObject_st){.count = count, .next = objects};
	objects = object;
	return object;
}

static bool known_object(CUuserObject object)
{
	CUuserObject o = objects;
	while (o && o != object)
		o = o->next;
	return o;
}

static void hold(CUgraph graph, CUuserObject object, unsigned count)
{
	graph->objects =
	        sc_grow(graph->objects, (graph->object_count + 1) * sizeof *graph->objects);
	graph->objects[graph->object_count++] = (struct retained){object, count};
}

void sc_graph_keep_memory(CUgraph graph, CUdeviceptr memory)
{
	CUuserObject object = make_object(1);
	object->memory = memory;
	hold(graph, object, 1);
}

CUresult CUDAAPI cuUserObjectCreate(CUuserObject *object, void *data, CUhostFn destroy,
                                    unsigned int count, unsigned int flags)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!object || !destroy || !count || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	*object = make_object(count);
	(*object)->destroy = destroy;
	(*object)->data = data;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuUserObjectRetain(CUuserObject object, unsigned int count)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!known_object(object) || !count)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	object->count += count;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuUserObjectRelease(CUuserObject object, unsigned int count)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!known_object(object) || !count || count > object->count)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	release(object, count);
	return sc_leave(CUDA_SUCCESS);
}

static bool known_graph(CUgraph graph)
{
	CUgraph g = graphs;
	while (g && g != graph)
		g = g->next;
	return g;
}

static CUresult enter_graph(CUgraph graph)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	return known_graph(graph) ? CUDA_SUCCESS : sc_leave(CUDA_ERROR_INVALID_VALUE);
}

CUresult CUDAAPI cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count,
                                         unsigned int flags)
{
	CUresult error = enter_graph(graph);
	if (error)
		return error;
	if (!known_object(object) || !count || flags & ~(unsigned)CU_GRAPH_USER_OBJECT_MOVE)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	if (!(flags & CU_GRAPH_USER_OBJECT_MOVE))
		object->count += count;
	hold(graph, object, count);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count)
{
	CUresult error = enter_graph(graph);
	if (error)
		return error;
	for (size_t i = 0; i < graph->object_count; i++) {
		if (graph->objects[i].object != object || graph->objects[i].count < count)
			continue;
		graph->objects[i].count -= count;
		if (!graph->objects[i].count)
			graph->objects[i] = graph->objects[--graph->object_count];
		release(object, count);
		return sc_leave(CUDA_SUCCESS);
	}
	return sc_leave(CUDA_ERROR_INVALID_VALUE);
}

static CUgraph empty_body(void)
{
	CUgraph graph = sc_alloc(sizeof *graph);
	*graph = (struct CUgraph_st){0};
	return graph;
}

CUgraph sc_graph_new(void)
{
	CUgraph graph = empty_body();
	graph->next = graphs;
	graphs = graph;
	return graph;
}

CUgraphNode sc_graph_add(CUgraph graph, struct sc_work *work, const struct sc_nodes *after)
{
	CUgraphNode node = sc_alloc(sizeof *node);
	*node = (struct CUgraphNode_st){.graph = graph, .index = graph->count, .work = work};
	sc_nodes_merge(&node->after, after);
	graph->nodes = sc_grow(graph->nodes, (graph->count + 1) * sizeof *graph->nodes);
	graph->nodes[graph->count++] = node;
	return node;
}

static void free_body(CUgraph graph)
{
	for (size_t i = 0; i < graph->count; i++) {
		sc_work_free(graph->nodes[i]->work);
		sc_nodes_clear(&graph->nodes[i]->after);
		free(graph->nodes[i]);
	}
	for (size_t i = 0; i < graph->object_count; i++)
		release(graph->objects[i].object, graph->objects[i].count);
	free(graph->nodes);
	free(graph->objects);
	free(graph);
}

void sc_graph_destroy(CUgraph graph)
{
	CUgraph *link = &graphs;
	while (*link != graph)
		link = &(*link)->next;
	*link = graph->next;
	free_body(graph);
}

static void mark_ancestors(CUgraphNode node)
{
	if (node->mark)
		return;
	node->mark = true;
	for (size_t i = 0; i < node->after.count; i++)
		mark_ancestors(node->after.list[i]);
}

bool sc_graph_joined(const struct sc_nodes *tips, const struct sc_nodes *ends)
{
	if (!tips->count)
		return true;
	CUgraph graph = tips->list[0]->graph;
	for (size_t i = 0; i < graph->count; i++)
		graph->nodes[i]->mark = false;
	for (size_t i = 0; i < ends->count; i++)
		mark_ancestors(ends->list[i]);
	for (size_t i = 0; i < tips->count; i++)
		if (!tips->list[i]->mark)
			return false;
	return true;
}

CUresult CUDAAPI cuGraphCreate(CUgraph *graph, unsigned int flags)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!graph || flags)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	*graph = sc_graph_new();
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph)
{
	CUresult error = enter_graph(graph);
	if (error)
		return error;
	sc_graph_destroy(graph);
	return sc_leave(CUDA_SUCCESS);
}

/* Also asked of the graph in a child node, which is in no list. */
CUresult CUDAAPI cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	CUresult error = graph ? sc_enter() : CUDA_ERROR_INVALID_VALUE;
	if (error)
		return error;
	for (size_t i = 0; nodes && i < *count; i++)
		nodes[i] = i < graph->count ? graph->nodes[i] : NULL;
	if (!nodes || *count > graph->count)
		*count = graph->count;
	return sc_leave(CUDA_SUCCESS);
}

bool sc_graph_is_kernel(CUgraphNode node)
{
	return node->work->type == CU_GRAPH_NODE_TYPE_KERNEL;
}

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	*type = node->work->type;
	return sc_leave(CUDA_SUCCESS);
}

static CUresult enter_node(CUgraphNode node, CUgraphNodeType type)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	return node->work->type == type ? CUDA_SUCCESS : sc_leave(CUDA_ERROR_INVALID_VALUE);
}

CUresult CUDAAPI cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params)
{
	CUresult error = enter_node(node, CU_GRAPH_NODE_TYPE_KERNEL);
	if (error)
		return error;
	sc_kernel_node(node->work->args, params);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *params)
{
	CUresult error = enter_node(node, CU_GRAPH_NODE_TYPE_MEMCPY);
	if (error)
		return error;
	sc_copy_node(node->work->args, params);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *params)
{
	CUresult error = enter_node(node, CU_GRAPH_NODE_TYPE_MEMSET);
	if (error)
		return error;
	sc_fill_node(node->work->args, params);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
	CUresult error = enter_node(node, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
	if (error)
		return error;
	CUdeviceptr address = *(const CUdeviceptr *)node->work->args;
	*params = (CUDA_MEM_ALLOC_NODE_PARAMS){.bytesize = sc_memory_find(address)->size,
	                                       .dptr = address};
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *address)
{
	CUresult error = enter_node(node, CU_GRAPH_NODE_TYPE_MEM_FREE);
	if (error)
		return error;
	*address = *(const CUdeviceptr *)node->work->args;
	return sc_leave(CUDA_SUCCESS);
}

/* A graph as a node of another: run as one piece, its nodes in any order that their edges allow. */
struct child {
	CUgraph body; /* owned */
};

static void mark_none(CUgraph body)
{
	for (size_t i = 0; i < body->count; i++)
		body->nodes[i]->mark = false;
}

static CUgraphNode choose(CUgraph body);

static CUresult run_child(const void *args)
{
	CUgraph body = ((const struct child *)args)->body;
	CUresult error = CUDA_SUCCESS;
	mark_none(body);
	for (size_t i = 0; i < body->count && !error; i++) {
		CUgraphNode node = choose(body);
		node->mark = true;
		error = node->work->run(node->work->args);
	}
	return error;
}

static void drop_child(const void *args)
{
	free_body(((const struct child *)args)->body);
}

static CUgraph copy_body(CUgraph graph);

static struct sc_work *child_work(CUgraph graph)
{
	const struct child child = {copy_body(graph)};
	struct sc_work *work =
	        sc_work_new(run_child, &child, sizeof child, CU_GRAPH_NODE_TYPE_GRAPH);
	work->drop = drop_child;
	return work;
}

CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
	CUresult error = enter_node(node, CU_GRAPH_NODE_TYPE_GRAPH);
	if (error)
		return error;
	*graph = ((const struct child *)node->work->args)->body;
	return sc_leave(CUDA_SUCCESS);
}

static struct sc_work *copy_work(const struct sc_work *from)
{
	if (from->type == CU_GRAPH_NODE_TYPE_GRAPH)
		return child_work(((const struct child *)from->args)->body);
	struct sc_work *work = sc_work_new(from->run, from->args, from->size, from->type);
	work->host = from->host;
	return work;
}

static CUgraph copy_body(CUgraph graph)
{
	CUgraph copy = empty_body();
	for (size_t i = 0; i < graph->count; i++) {
		struct sc_work *work = copy_work(graph->nodes[i]->work);
		CUgraphNode node = sc_graph_add(copy, work, &(struct sc_nodes){0});
		for (size_t d = 0; d < graph->nodes[i]->after.count; d++)
			sc_nodes_add(&node->after,
			             copy->nodes[graph->nodes[i]->after.list[d]->index]);
	}
	for (size_t i = 0; i < graph->object_count; i++) {
		graph->objects[i].object->count++;
		hold(copy, graph->objects[i].object, 1);
	}
	return copy;
}

/* Nodes added by hand. */
static CUresult add_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                         struct sc_work *work)
{
	struct sc_nodes edges = {0};
	for (size_t i = 0; i < count; i++)
		sc_nodes_add(&edges, after[i]);
	*node = sc_graph_add(graph, work, &edges);
	sc_nodes_clear(&edges);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                                         size_t count, const CUDA_KERNEL_NODE_PARAMS *params)
{
	struct sc_work *work;
	CUresult error = enter_graph(graph);
	if (error)
		return error;
	error = sc_kernel_work(params, &work);
	return error ? sc_leave(error) : add_node(node, graph, after, count, work);
}

CUresult CUDAAPI cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                                      size_t count, const CUDA_MEMCPY3D *params, CUcontext context)
{
	CUresult error = enter_graph(graph);
	(void)context;
	return error ? error : add_node(node, graph, after, count, sc_copy_work(params));
}

CUresult CUDAAPI cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                                      size_t count, const CUDA_MEMSET_NODE_PARAMS *params,
                                      CUcontext context)
{
	CUresult error = enter_graph(graph);
	(void)context;
	return error ? error : add_node(node, graph, after, count, sc_fill_work(params));
}

CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph,
                                          const CUgraphNode *after, size_t count, CUgraph child)
{
	CUresult error = enter_graph(graph);
	if (error)
		return error;
	if (!known_graph(child))
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	return add_node(node, graph, after, count, child_work(child));
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph,
                                             unsigned long long flags)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	(void)flags;
	if (error)
		return error;
	if (!executable || !known_graph(graph))
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	CUgraphExec exec = sc_alloc(sizeof *exec);
	*exec = (struct CUgraphExec_st){.body = copy_body(graph),
	                                .count = 1,
	                                .context = context,
	                                .live = true,
	                                .next = executables};
	*executable = executables = exec;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *executable, CUgraph graph,
                                              CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	CUresult error = cuGraphInstantiateWithFlags(executable, graph, params->flags);
	params->hErrNode_out = NULL;
	params->result_out = error ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
	return error;
}

static void release_exec(CUgraphExec exec)
{
	if (--exec->count)
		return;
	CUgraphExec *link = &executables;
	while (*link != exec)
		link = &(*link)->next;
	*link = exec->next;
	free_body(exec->body);
	free(exec);
}

static bool known_exec(CUgraphExec exec)
{
	for (CUgraphExec e = executables; e; e = e->next)
		if (e == exec)
			return e->live;
	return false;
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec exec)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!known_exec(exec))
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	exec->live = false;
	release_exec(exec);
	return sc_leave(CUDA_SUCCESS);
}

static bool same_shape(CUgraph a, CUgraph b)
{
	for (size_t i = 0; i < a->count && a->count == b->count; i++)
		if (a->nodes[i]->work->type != b->nodes[i]->work->type)
			return false;
	return a->count == b->count;
}

/* While no launch is queued: those run the nodes that are replaced. */
CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph,
                                      CUgraphExecUpdateResultInfo *result)
{
	CUresult error = enter_graph(graph);
	if (error)
		return error;
	if (!known_exec(exec) || exec->count != 1)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	bool same = same_shape(exec->body, graph);
	result->result =
	        same ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
	if (!same)
		return sc_leave(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
	free_body(exec->body);
	exec->body = copy_body(graph);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                   const CUDA_KERNEL_NODE_PARAMS *params)
{
	struct sc_work *work;
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!known_exec(exec) || exec->count != 1 || node->index >= exec->body->count)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	error = sc_kernel_work(params, &work);
	if (error)
		return sc_leave(error);
	sc_work_free(exec->body->nodes[node->index]->work);
	exec->body->nodes[node->index]->work = work;
	return sc_leave(CUDA_SUCCESS);
}

static bool runnable(CUgraphNode node)
{
	for (size_t i = 0; i < node->after.count; i++)
		if (!node->after.list[i]->mark)
			return false;
	return !node->mark;
}

static CUgraphNode choose(CUgraph body)
{
	CUgraphNode chosen = NULL;
	unsigned seen = 0;
	for (size_t i = 0; i < body->count; i++)
		if (runnable(body->nodes[i]) && sc_random() % ++seen == 0)
			chosen = body->nodes[i];
	return chosen;
}

/* A node in a stream. */
struct launched {
	CUgraphExec exec; /* kept until the node has run */
	CUgraphNode node; /* of its body                 */
};

static CUresult run_node(const void *args)
{
	const struct sc_work *work = ((const struct launched *)args)->node->work;
	return work->run(work->args);
}

static void drop_node(const void *args)
{
	release_exec(((const struct launched *)args)->exec);
}

static void launch_node(CUgraphExec exec, CUgraphNode node, CUstream stream)
{
	const struct launched launched = {exec, node};
	struct sc_work *work = sc_work_new(run_node, &launched, sizeof launched, node->work->type);
	work->host = node->work->host;
	work->drop = drop_node;
	exec->count++;
	sc_submit(stream, work);
	node->mark = true;
}

static void launch_nodes(CUgraphExec exec, CUstream stream)
{
	CUgraph body = exec->body;
	for (size_t i = 0; i < body->count; i++)
		body->nodes[i]->mark = false;
	for (size_t i = 0; i < body->count; i++)
		launch_node(exec, choose(body), stream);
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec exec, CUstream handle)
{
	CUstream stream;
	CUresult error = sc_enter();
	if (error)
		return error;
	error = known_exec(exec) ? sc_stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
	if (!error)
		error = sc_capture_check(stream);
	if (!error && stream->capture) {
		sc_capture_spoil(stream->capture);
		error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	if (error)
		return sc_leave(error);
	softcuda_counters.graph_launches++;
	launch_nodes(exec, stream);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec exec, CUstream handle)
{
	CUstream stream;
	CUresult error = sc_enter();
	if (error)
		return error;
	error = known_exec(exec) ? sc_stream_find(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
	return sc_leave(error);
}
