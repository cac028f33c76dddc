/* SPDX-License-Identifier: Apache-2.0 */
/* Sluice's version, here alone: pyproject.toml, the Makefile and the core read it from this line. */
#ifndef SLUICE_VERSION_H
#define SLUICE_VERSION_H

#define SLUICE_VERSION "0.1.0"

#endif
