/* What leave.c needs a C++ compiler for. */
#define EXPORT extern "C" __attribute__((visibility("default")))

struct left {
};

EXPORT void throw_exception(void)
{
	throw left();
}

/* True if the call ended in throw_exception(). */
EXPORT int catch_exception(void (*call)(void))
{
	try {
		call();
	} catch (const left &) {
		return 1;
	}
	return 0;
}
