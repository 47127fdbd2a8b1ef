/* A filesystem that answers slowly: the files of one directory, read only, with a delay for each lookup, and one for each read.
 *
 *     gcc -O2 slowfs.c -o slowfs $(pkg-config fuse3 --cflags --libs)
 *     SLOWFS_MICROSECONDS=2000 SLOWFS_SOURCE=/directory ./slowfs /mount/point
 *
 * SLOWFS_READ_MICROSECONDS is for reads; default: none. The kernel remembers a lookup for a second, as FUSE does by default. Many requests are served at the same time.
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int source;
static useconds_t delay, read_delay;

static const char *inside(const char *path) { return path[1] ? path + 1 : "."; }

static int look(const char *path, struct stat *found, struct fuse_file_info *file) {
    (void)file;
    usleep(delay);
    return fstatat(source, inside(path), found, AT_SYMLINK_NOFOLLOW) ? -errno : 0;
}

static int follow(const char *path, char *buffer, size_t size) {
    ssize_t length = readlinkat(source, inside(path), buffer, size - 1);
    if (length < 0)
        return -errno;
    buffer[length] = 0;
    return 0;
}

static int list(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *file,
                enum fuse_readdir_flags flags) {
    (void)offset, (void)file, (void)flags;
    int directory = openat(source, inside(path), O_RDONLY | O_DIRECTORY);
    DIR *entries = directory < 0 ? NULL : fdopendir(directory);
    if (!entries)
        return -errno;
    for (struct dirent *entry; (entry = readdir(entries));)
        fill(buffer, entry->d_name, NULL, 0, 0);
    closedir(entries);
    return 0;
}

static int start(const char *path, struct fuse_file_info *file) {
    int opened = openat(source, inside(path), file->flags);
    file->fh = opened;
    return opened < 0 ? -errno : 0;
}

static int get(const char *path, char *buffer, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)path;
    usleep(read_delay);
    ssize_t length = pread(file->fh, buffer, size, offset);
    return length < 0 ? -errno : length;
}

static int end(const char *path, struct fuse_file_info *file) {
    (void)path;
    return close(file->fh) ? -errno : 0;
}

int main(int count, char **arguments) {
    static const struct fuse_operations operations = {
        .getattr = look, .readlink = follow, .readdir = list, .open = start, .read = get, .release = end};
    const char *directory = getenv("SLOWFS_SOURCE"), *microseconds = getenv("SLOWFS_MICROSECONDS");
    source = directory ? open(directory, O_RDONLY | O_DIRECTORY) : -1;
    if (source < 0 || !microseconds)
        return fprintf(stderr, "set SLOWFS_SOURCE and SLOWFS_MICROSECONDS\n"), 1;
    delay = atoi(microseconds);
    read_delay = atoi(getenv("SLOWFS_READ_MICROSECONDS") ? getenv("SLOWFS_READ_MICROSECONDS") : "0");
    return fuse_main(count, arguments, &operations, NULL);
}
