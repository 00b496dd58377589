/* The thunks that stand before the driver functions of submissions.h: one for each exported name,
 * and QS_LOOKUP_SLOTS and QS_KEPT_SLOTS that driver.c gives out to look-ups. Each calls its original
 * with the caller's arguments and then adds one to the counter of the thread's depth (guard.c).
 *
 * It counts after the call, which a tail jump could not: whoever is told that the work is submitted
 * must find it counted, and between a count and a later submission another thread could take a
 * quantised copy of what that submission overwrites. So a call it is, which passes on the argument
 * registers as they came and copies the arguments on the stack: fourteen words in all
 * (cuLaunchKernel has eleven arguments; cuIpcOpenMemHandle takes a struct of 64 bytes by value, which
 * x86-64 passes as eight words on the stack; none takes floating point).
 *
 * While anything is watched (qs_watching, operand/track.h), and always for the functions of the last
 * group, the thunk keeps the arguments and hands them to qs_submitting() before and qs_submitted()
 * after the call, in the frame that struct qs_call (driver.h) describes. Whatever was watched first during the call of another
 * thread is not told: qs_submitted_unseen() takes it that everything was written.
 *
 * The index in r10 (x17) is for that, and for the thunks whose original is not known yet: it is
 * `lazy` then, which asks qs_thunk_resolve() and goes there.
 */
#include "intercept/submissions.h"

#define QS_COUNTED_THUNK(name)  exported_thunk name, call_and_count;
#define QS_KEPT_THUNK(name)     exported_thunk name, call_and_tell;
#define QS_LAZY_ORIGINAL(name)  .quad lazy;

	.data
	.p2align 6
	.globl	qs_thunk_original
	.hidden	qs_thunk_original
	.type	qs_thunk_original, %object
qs_thunk_original:
	QS_SUBMISSION_COUNTED(QS_LAZY_ORIGINAL)
	.zero	8 * QS_LOOKUP_SLOTS
	QS_SUBMISSION_KEPT(QS_LAZY_ORIGINAL)
	.zero	8 * QS_KEPT_SLOTS
	.size	qs_thunk_original, .-qs_thunk_original

	.text
	.globl	qs_thunks
	.hidden	qs_thunks
	.globl	qs_thunks_end
	.hidden	qs_thunks_end

	.macro	exported_thunk name, way
	.p2align 5
	.globl	\name
	.type	\name, %function
\name:
	thunk	\way
	.size	\name, .-\name
	.endm

#if defined(__x86_64__)

	.macro	thunk way
	.p2align 5
#ifdef __CET__
	endbr64
#endif
	movq	qs_thunk_original + 8 * index(%rip), %r11
	movl	$index, %r10d
	jmp	\way
	.set	index, index + 1
	.endm

	.p2align 5
	.cfi_startproc
	.set	index, 0
qs_thunks:
	QS_SUBMISSION_COUNTED(QS_COUNTED_THUNK)
	.rept	QS_LOOKUP_SLOTS
	thunk	call_and_count
	.endr
	QS_SUBMISSION_KEPT(QS_KEPT_THUNK)
	.rept	QS_KEPT_SLOTS
	thunk	call_and_tell
	.endr
qs_thunks_end:
	.cfi_endproc

	.macro	pass_stack_arguments
	pushq	72(%rbp)
	pushq	64(%rbp)
	pushq	56(%rbp)
	pushq	48(%rbp)
	pushq	40(%rbp)
	pushq	32(%rbp)
	pushq	24(%rbp)
	pushq	16(%rbp)
	.endm

	.macro	count
	movq	qs_depth@GOTTPOFF(%rip), %rcx
	movzbl	%fs:(%rcx), %ecx
	imull	$QS_COUNT_BYTES, %ecx, %ecx
	leaq	qs_submissions(%rip), %rdx
	lock incq (%rdx,%rcx)
	.endm

	.p2align 4
	.type	call_and_count, %function
call_and_count:
	.cfi_startproc
	cmpb	$0, qs_watching(%rip)
	jne	call_and_tell
	pushq	%rbp
	.cfi_def_cfa_offset 16
	.cfi_offset %rbp, -16
	movq	%rsp, %rbp
	.cfi_def_cfa_register %rbp
	pass_stack_arguments
	call	*%r11
	count
	cmpb	$0, qs_watching(%rip)
	jne	1f
	leave
	.cfi_remember_state
	.cfi_def_cfa %rsp, 8
	ret
1:	.cfi_restore_state
	movq	%rax, (%rsp)
	call	qs_submitted_unseen
	movq	(%rsp), %rax
	leave
	.cfi_def_cfa %rsp, 8
	ret
	.cfi_endproc
	.size	call_and_count, .-call_and_count

	.p2align 4
	.type	call_and_tell, %function
call_and_tell:
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	.cfi_offset %rbp, -16
	movq	%rsp, %rbp
	.cfi_def_cfa_register %rbp
	pushq	%r10
	pushq	%r9
	pushq	%r8
	pushq	%rcx
	pushq	%rdx
	pushq	%rsi
	pushq	%rdi
	pushq	%rax
	leaq	-64(%rbp), %rdi
	call	qs_submitting
	movq	-56(%rbp), %rdi
	movq	-48(%rbp), %rsi
	movq	-40(%rbp), %rdx
	movq	-32(%rbp), %rcx
	movq	-24(%rbp), %r8
	movq	-16(%rbp), %r9
	movq	-8(%rbp), %r10
	leaq	qs_thunk_original(%rip), %r11
	movq	(%r11,%r10,8), %r11
	pass_stack_arguments
	call	*%r11
	count
	movq	%rax, -64(%rbp)
	leaq	-64(%rbp), %rdi
	call	qs_submitted
	movq	-64(%rbp), %rax
	leave
	.cfi_def_cfa %rsp, 8
	ret
	.cfi_endproc
	.size	call_and_tell, .-call_and_tell

/* Called in place of an original, in the frame of the caller's arguments. */
	.p2align 4
	.type	lazy, %function
lazy:
	.cfi_startproc
#ifdef __CET__
	endbr64
#endif
	pushq	%rdi
	.cfi_adjust_cfa_offset 8
	pushq	%rsi
	.cfi_adjust_cfa_offset 8
	pushq	%rdx
	.cfi_adjust_cfa_offset 8
	pushq	%rcx
	.cfi_adjust_cfa_offset 8
	pushq	%r8
	.cfi_adjust_cfa_offset 8
	pushq	%r9
	.cfi_adjust_cfa_offset 8
	subq	$8, %rsp
	.cfi_adjust_cfa_offset 8
	movl	%r10d, %edi
	movq	8(%rbp), %rsi
	call	qs_thunk_resolve
	movq	%rax, %r11
	addq	$8, %rsp
	.cfi_adjust_cfa_offset -8
	popq	%r9
	.cfi_adjust_cfa_offset -8
	popq	%r8
	.cfi_adjust_cfa_offset -8
	popq	%rcx
	.cfi_adjust_cfa_offset -8
	popq	%rdx
	.cfi_adjust_cfa_offset -8
	popq	%rsi
	.cfi_adjust_cfa_offset -8
	popq	%rdi
	.cfi_adjust_cfa_offset -8
	jmp	*%r11
	.cfi_endproc
	.size	lazy, .-lazy

#elif defined(__aarch64__)

	.macro	thunk way
	.p2align 5
#ifdef __ARM_FEATURE_BTI_DEFAULT
	bti	c
#endif
	adrp	x16, qs_thunk_original + 8 * index
	ldr	x16, [x16, #:lo12:qs_thunk_original + 8 * index]
	mov	w17, #index
	b	\way
	.set	index, index + 1
	.endm

	.p2align 5
	.cfi_startproc
	.set	index, 0
qs_thunks:
	QS_SUBMISSION_COUNTED(QS_COUNTED_THUNK)
	.rept	QS_LOOKUP_SLOTS
	thunk	call_and_count
	.endr
	QS_SUBMISSION_KEPT(QS_KEPT_THUNK)
	.rept	QS_KEPT_SLOTS
	thunk	call_and_tell
	.endr
qs_thunks_end:
	.cfi_endproc

	.macro	pass_stack_arguments
	ldp	x9, x10, [x29, #48]
	stp	x9, x10, [sp, #-16]!
	ldp	x9, x10, [x29, #32]
	stp	x9, x10, [sp, #-16]!
	ldp	x9, x10, [x29, #16]
	stp	x9, x10, [sp, #-16]!
	.endm

	.macro	count
	adrp	x9, :gottprel:qs_depth
	ldr	x9, [x9, #:gottprel_lo12:qs_depth]
	mrs	x10, tpidr_el0
	ldrb	w9, [x10, x9]
	mov	w10, #QS_COUNT_BYTES
	mul	w9, w9, w10
	adrp	x10, qs_submissions
	add	x10, x10, #:lo12:qs_submissions
	add	x10, x10, x9
1:	ldaxr	x9, [x10]
	add	x9, x9, #1
	stlxr	w11, x9, [x10]
	cbnz	w11, 1b
	.endm

	.macro	enter
	stp	x29, x30, [sp, #-16]!
	.cfi_def_cfa_offset 16
	.cfi_offset 29, -16
	.cfi_offset 30, -8
	mov	x29, sp
	.cfi_def_cfa_register 29
	.endm

	.macro	return
	mov	sp, x29
	.cfi_def_cfa_register 31
	ldp	x29, x30, [sp], #16
	.cfi_restore 29
	.cfi_restore 30
	.cfi_def_cfa_offset 0
	ret
	.endm

	/* In order with the counts of other threads: an acquiring load. */
	.macro	load_watching register
	adrp	x9, qs_watching
	add	x9, x9, #:lo12:qs_watching
	ldarb	\register, [x9]
	.endm

	.p2align 4
	.type	call_and_count, %function
call_and_count:
	.cfi_startproc
	load_watching w9
	cbnz	w9, call_and_tell
	enter
	pass_stack_arguments
	blr	x16
	count
	load_watching w9
	cbnz	w9, 2f
	.cfi_remember_state
	return
2:	.cfi_restore_state
	str	x0, [sp]
	bl	qs_submitted_unseen
	ldr	x0, [sp]
	return
	.cfi_endproc
	.size	call_and_count, .-call_and_count

	.p2align 4
	.type	call_and_tell, %function
call_and_tell:
	.cfi_startproc
	enter
	stp	x7, x17, [sp, #-16]!
	stp	x5, x6, [sp, #-16]!
	stp	x3, x4, [sp, #-16]!
	stp	x1, x2, [sp, #-16]!
	stp	xzr, x0, [sp, #-16]!
	sub	x0, x29, #80
	bl	qs_submitting
	ldr	x0, [x29, #-72]
	ldp	x1, x2, [x29, #-64]
	ldp	x3, x4, [x29, #-48]
	ldp	x5, x6, [x29, #-32]
	ldp	x7, x17, [x29, #-16]
	adrp	x16, qs_thunk_original
	add	x16, x16, #:lo12:qs_thunk_original
	ldr	x16, [x16, x17, lsl #3]
	pass_stack_arguments
	blr	x16
	count
	str	x0, [x29, #-80]
	sub	x0, x29, #80
	bl	qs_submitted
	ldr	x0, [x29, #-80]
	return
	.cfi_endproc
	.size	call_and_tell, .-call_and_tell

/* Called in place of an original, in the frame of the caller's arguments. */
	.p2align 4
	.type	lazy, %function
lazy:
	.cfi_startproc
#ifdef __ARM_FEATURE_BTI_DEFAULT
	bti	c
#endif
	stp	x29, x30, [sp, #-80]!
	.cfi_def_cfa_offset 80
	.cfi_offset 29, -80
	.cfi_offset 30, -72
	stp	x0, x1, [sp, #16]
	stp	x2, x3, [sp, #32]
	stp	x4, x5, [sp, #48]
	stp	x6, x7, [sp, #64]
	mov	w0, w17
	ldr	x1, [x29, #8]
	bl	qs_thunk_resolve
	mov	x16, x0
	ldp	x0, x1, [sp, #16]
	ldp	x2, x3, [sp, #32]
	ldp	x4, x5, [sp, #48]
	ldp	x6, x7, [sp, #64]
	ldp	x29, x30, [sp], #80
	.cfi_restore 29
	.cfi_restore 30
	.cfi_def_cfa_offset 0
	br	x16
	.cfi_endproc
	.size	lazy, .-lazy

#else
#error "driver.S: write the thunks for this architecture"
#endif
	.section .note.GNU-stack, "", %progbits
