/* The compiled kernels, one fat binary for each file of kernels/, as the driver loads them.
 *
 * The assembler is told where they were built. Read-only data: the driver copies what it needs.
 * A new kernel file is one line at the end here and one declaration in device.h.
 */
	.macro kernels name
	.globl	qs_fatbin_\name
	.hidden	qs_fatbin_\name
	.globl	qs_fatbin_\name\()_end
	.hidden	qs_fatbin_\name\()_end
	.balign	16
	.type	qs_fatbin_\name, %object
qs_fatbin_\name:
	.incbin	"\name\().fatbin"
	.size	qs_fatbin_\name, . - qs_fatbin_\name
qs_fatbin_\name\()_end:
	.byte	0
	.endm

	.section .rodata.qs_fatbin, "a", %progbits
	kernels	quantise
	kernels	nf4
	kernels	hash
	kernels	compare

	.section .note.GNU-stack, "", %progbits
