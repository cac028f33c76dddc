#include "hook.h"
static const char *const sonames[]={NULL};struct limit_library limit_hip={.sonames=sonames};
