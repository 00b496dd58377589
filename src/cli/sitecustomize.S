/* The text of sitecustomize.py (the assembler runs in the root of the repository). */

	.global qs_sitecustomize, qs_sitecustomize_end
	.hidden qs_sitecustomize, qs_sitecustomize_end
	.section .rodata
qs_sitecustomize:
	.incbin "src/cli/sitecustomize.py"
qs_sitecustomize_end:

	.section .note.GNU-stack, "", %progbits
