#!/bin/sh
# Says at once what `make demo` lacks, before minutes are spent on installing; dev/demo/backend.py has the last word.
if [ "$CLUSTER" = kind ]; then
  for each in docker kind kubectl helm; do
    command -v "$each" >/dev/null || { echo "error: CLUSTER=kind needs $each on the PATH." >&2; exit 2; }
  done
  exit 0
fi
if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ]; then
  echo "error: make demo needs root on Linux (\`sudo make demo\`). CLUSTER=kind make demo uses Docker and kind; nobody has run that yet." >&2
  exit 2
fi
needed=19 # GB: the tools and images, and what uv and Go keep
cache=${XDG_CACHE_HOME:-$HOME/.cache}
if [ -e "$cache/shoal/images/built/shoal-digits_dev/manifest.json" ]; then exit 0; fi # the last of what is built
disk=$cache
while [ ! -d "$disk" ]; do disk=$(dirname "$disk"); done
free=$(df -Pk "$disk" | awk 'NR == 2 { print $4 }')
du -sk "$cache/shoal" "$cache/uv" "$cache/go-build" 2>/dev/null | awk -v needed="$needed" -v free="$free" -v cache="$cache" '
  { there += $1 }
  END {
    if (there + free >= needed * 1e9 / 1024) exit
    printf "error: make demo needs %d GB in %s the first time, of which %.1f GB are there, and %.1f GB are free. ", needed, cache, there * 1024 / 1e9, free * 1024 / 1e9
    print "Set XDG_CACHE_HOME to a folder on a disk that has them."
    exit 2
  }' >&2
