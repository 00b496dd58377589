/* The texts of the presets, from config/ (the assembler runs in the root of the repository). The
 * length is the distance of the two symbols. */

	.macro preset name, file
	.global qs_preset_\name, qs_preset_\name\()_end
	.hidden qs_preset_\name, qs_preset_\name\()_end
qs_preset_\name:
	.incbin "config/\file"
qs_preset_\name\()_end:
	.byte 0
	.endm

	.section .rodata
	preset default, default.ini
	preset observe, observe.ini
	preset lossless, lossless.ini
	preset fp8_training, fp8-training.ini
	preset careful, careful.ini
	preset nf4_decode, nf4-decode.ini
	preset qlora, qlora.ini

	.section .note.GNU-stack, "", %progbits
