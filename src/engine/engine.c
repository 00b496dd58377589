/* The table of engines. */
#include "engine/engine.h"

#include <stdarg.h>
#include <stdio.h>

static const struct qs_engine *const engines[] = {
        &qs_engine_fp8,
        &qs_engine_bf16,
        &qs_engine_nf4,
};

const struct qs_engine *qs_engine_of(enum qs_action action)
{
	for (size_t i = 0; i < sizeof engines / sizeof *engines; i++)
		if (engines[i]->action == action)
			return engines[i];
	return NULL;
}

bool qs_failed(struct qs_failure *failure, enum qs_reason reason, const char *format, ...)
{
	va_list arguments;
	failure->reason = reason;
	va_start(arguments, format);
	vsnprintf(failure->detail, sizeof failure->detail, format, arguments);
	va_end(arguments);
	return false;
}
