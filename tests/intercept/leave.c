/* Products of which some do not return (wrap_leave.c). "leave ACTIONS": p = a product, whose first
 * element is printed, d = one from deeper in the stack, q = one that is not looked at, h = one of
 * another shape, after which the program waits and idles, l = one that is left, t = one that is
 * left by a C++ exception, T = the same in another thread, X = one whose thread ends there, S = one
 * while another thread is in the middle of one, c = how many descriptions for cuBLASLt there are,
 * w = one that is left and writes what the others read, v = one that writes a bit of the weight. */
#define _GNU_SOURCE
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SIDE  64
#define BYTES (SIDE * SIDE * sizeof(uint16_t))

static cublasHandle_t handle;
static uint16_t *a, *b, *c; /* device */
static jmp_buf **leave_to;  /* of wrap_leave.c */
static void (**leave_by)(void);
static void (*throw_exception)(void); /* of catch.cc */
static int (*catch_exception)(void (*call)(void));

static int product(uint16_t *from, uint16_t *to, int n)
{
	const float one = 1.0f, zero = 0.0f;
	return (int)cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, SIDE, n, SIDE, &one, a,
	                         CUDA_R_16BF, SIDE, from, CUDA_R_16BF, SIDE, &zero, to, CUDA_R_16BF,
	                         SIDE, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

static void show(int status)
{
	uint16_t first = 0;
	if (status || cudaMemcpy(&first, c, sizeof first, cudaMemcpyDeviceToHost))
		exit(2);
	printf("%04x\n", first);
}

/* Frames are not merged: the product is made from below a page of stack. */
__attribute__((noinline)) static int deeper(void)
{
	volatile char page[4096];
	page[0] = 0;
	return product(b, c, SIDE) + page[0];
}

static void product_only(void)
{
	product(b, c, SIDE);
}

static void product_left_by_exception(void)
{
	*leave_by = throw_exception;
	if (!catch_exception(product_only))
		exit(3);
}

static void end_of_thread(void)
{
	pthread_exit(NULL);
}

static void *in_thread(void *action)
{
	if (cudaSetDevice(0))
		exit(4);
	if (*(char *)action == 'T')
		product_left_by_exception();
	*leave_by = end_of_thread;
	if (*(char *)action == 'X')
		product_only();
	return NULL;
}

static void act_in_thread(char action)
{
	pthread_t thread;
	if (pthread_create(&thread, NULL, in_thread, &action) || pthread_join(thread, NULL))
		exit(4);
	*leave_by = NULL;
}

static _Atomic int stage; /* of a call that takes its time: 1 = under way, 2 = may return */

static void take_time(void)
{
	stage = 1;
	while (stage != 2)
		usleep(1000);
}

static void *product_that_takes_time(void *unused)
{
	if (cudaSetDevice(0))
		exit(4);
	*leave_by = take_time;
	product_only();
	return unused;
}

static void act_beside_another(void)
{
	pthread_t thread;
	stage = 0;
	if (pthread_create(&thread, NULL, product_that_takes_time, NULL))
		exit(4);
	while (stage != 1)
		usleep(1000);
	show(product(b, c, SIDE));
	stage = 2;
	if (pthread_join(thread, NULL))
		exit(4);
}

/* By softcuda. */
static long counted(const char *what)
{
	void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	long (*get)(const char *);
	*(void **)&get = driver ? dlsym(driver, "softcuda_get") : NULL;
	return get ? get(what) : -1;
}

static void act(char action)
{
	jmp_buf here;
	switch (action) {
	case 'p':
		show(product(b, c, SIDE));
		break;
	case 'd':
		show(deeper());
		break;
	case 'q':
		product(b, c, SIDE);
		break;
	case 'h':
		product(b, c, SIDE / 4);
		cudaDeviceSynchronize();
		usleep(1000);
		break;
	case 't':
		product_left_by_exception();
		break;
	case 'S':
		act_beside_another();
		break;
	case 'c':
		printf("%04lx\n", counted("descs") - counted("descs_destroyed"));
		break;
	case 'T':
	case 'X':
		act_in_thread(action);
		break;
	default:
		if (setjmp(here))
			return;
		*leave_to = &here;
		if (action == 'w')
			product(a, b, SIDE / 2);
		else if (action == 'v')
			product(b, a, 1);
		else
			product(b, c, SIDE);
		exit(3);
	}
}

int main(int argc, char **argv)
{
	leave_to = (jmp_buf **)dlsym(RTLD_DEFAULT, "leave_to");
	*(void **)&leave_by = dlsym(RTLD_DEFAULT, "leave_by");
	*(void **)&throw_exception = dlsym(RTLD_DEFAULT, "throw_exception");
	*(void **)&catch_exception = dlsym(RTLD_DEFAULT, "catch_exception");
	if (argc != 2 || !leave_to || !leave_by || !throw_exception || !catch_exception ||
	    cudaMalloc((void **)&a, BYTES) || cudaMalloc((void **)&b, BYTES) ||
	    cudaMalloc((void **)&c, BYTES) || cudaMemset(a, 0x3c, BYTES) ||
	    cudaMemset(b, 0x3c, BYTES) || cublasCreate(&handle))
		return 1;
	for (const char *action = argv[1]; *action; action++)
		act(*action);
	return 0;
}
