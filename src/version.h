/* The version, as `qshim --version`, the logs and the counters file give it. */
#ifndef QS_VERSION_H
#define QS_VERSION_H

#define QS_VERSION "0.1.0"

#endif
