/* The exported dlsym.
 *
 * glibc judges the caller of dlsym by its return address (RTLD_NEXT, RTLD_DEFAULT in a local scope,
 * namespaces), so an ordinary forwarding call would make every look-up ours: other preloaded
 * libraries that use RTLD_NEXT would recurse for ever. This one asks qs_dlsym_filter(), and unless
 * that has an answer jumps to the real dlsym with the registers and the stack as they came.
 *
 * void *qs_dlsym_filter(void *handle, const char *name, const void *caller): NULL = go on to the real one,
 * (void *)-1 = the answer is NULL (dlerror() is set), anything else = the answer.
 */
	.text
	.globl	dlsym
	.type	dlsym, %function
#if defined(__x86_64__)
	.p2align 4
dlsym:
	.cfi_startproc
#ifdef __CET__
	endbr64
#endif
	pushq	%rdi
	.cfi_adjust_cfa_offset 8
	pushq	%rsi
	.cfi_adjust_cfa_offset 8
	subq	$8, %rsp
	.cfi_adjust_cfa_offset 8
	movq	24(%rsp), %rdx
	call	qs_dlsym_filter
	addq	$8, %rsp
	.cfi_adjust_cfa_offset -8
	popq	%rsi
	.cfi_adjust_cfa_offset -8
	popq	%rdi
	.cfi_adjust_cfa_offset -8
	testq	%rax, %rax
	jz	1f
	cmpq	$-1, %rax
	je	2f
	ret
1:	jmp	*qs_dlsym_next(%rip)
2:	xorl	%eax, %eax
	ret
	.cfi_endproc
#elif defined(__aarch64__)
	.p2align 4
dlsym:
	.cfi_startproc
	stp	x29, x30, [sp, #-32]!
	.cfi_def_cfa_offset 32
	.cfi_offset 29, -32
	.cfi_offset 30, -24
	stp	x0, x1, [sp, #16]
	mov	x2, x30
	bl	qs_dlsym_filter
	mov	x9, x0
	ldp	x0, x1, [sp, #16]
	ldp	x29, x30, [sp], #32
	.cfi_restore 29
	.cfi_restore 30
	.cfi_def_cfa_offset 0
	cbz	x9, 1f
	cmn	x9, #1
	csel	x0, xzr, x9, eq
	ret
1:	adrp	x9, qs_dlsym_next
	ldr	x9, [x9, #:lo12:qs_dlsym_next]
	br	x9
	.cfi_endproc
#else
#error "dlsym.S: write the tail jump for this architecture"
#endif
	.size	dlsym, .-dlsym
	.section .note.GNU-stack, "", %progbits
