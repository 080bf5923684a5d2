"""The build files in other places than the usual ones: a multiarch prefix, a folder with a space, another project.

Usage: layouts_test.py SOURCE CMAKE GENERATOR. PKG_CONFIG names pkg-config; without it its part is skipped.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE, CMAKE, GENERATOR = sys.argv[1:4]
PARENT = f"""
cmake_minimum_required(VERSION 3.25)
project(parent VERSION 9.9 LANGUAGES CXX)
set(SKIM_MPI OFF)
add_subdirectory("{SOURCE}" skim)
"""
USER_OF_LIBTORCH = f"""
cmake_minimum_required(VERSION 3.25)
project(main LANGUAGES CXX)
set(CMAKE_MODULE_PATH "{SOURCE}/cmake")
find_package(Libtorch REQUIRED)
add_executable(main main.cpp)
target_link_libraries(main PRIVATE Libtorch::Libtorch)
"""


class Layouts(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "with a space")
        self.build = self.folder / "build"

    def cmake(self, *arguments):
        done = subprocess.run([CMAKE, *map(str, arguments)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def configure(self, source, *options):
        self.cmake("-G", GENERATOR, "-S", source, "-B", self.build, *options)

    def configure_library(self, *options):
        self.configure(SOURCE, "-DSKIM_TRAIN=OFF", "-DSKIM_DEVELOPER=OFF", "-DSKIM_MPI=OFF", *options)

    @unittest.skipUnless(shutil.which(os.environ.get("PKG_CONFIG", "pkg-config")), "there is no pkg-config")
    def test_pkg_config_finds_headers_and_library_beside_its_file(self):
        for libdir, includedir in [("lib", "include"), ("lib/x86_64-linux-gnu", "include/deep")]:
            with self.subTest(libdir):
                self.configure_library(f"-DCMAKE_INSTALL_LIBDIR={libdir}", f"-DCMAKE_INSTALL_INCLUDEDIR={includedir}")
                place = self.folder / "prefix" / libdir / "pkgconfig"
                place.mkdir(parents=True)
                shutil.copy(self.build / "skim.pc", place)
                flags = subprocess.run(
                    [os.environ.get("PKG_CONFIG", "pkg-config"), "--cflags", "--libs", "skim"],
                    capture_output=True, text=True, check=True, env={**os.environ, "PKG_CONFIG_PATH": str(place)})
                found = [os.path.normpath(flag[2:]) for flag in shlex.split(flags.stdout) if flag[:2] in ("-I", "-L")]
                self.assertEqual(found, [str(self.folder / "prefix" / folder) for folder in (includedir, libdir)])

    def test_the_installed_target_names_the_folder_of_the_headers(self):
        self.configure_library("-DCMAKE_INSTALL_INCLUDEDIR=include/deep")
        [targets] = self.build.glob("CMakeFiles/Export/**/skimTargets.cmake")
        self.assertRegex(targets.read_text(), r'INTERFACE_INCLUDE_DIRECTORIES "\$\{_IMPORT_PREFIX\}/include/deep"')

    def test_a_program_links_libtorch_in_a_folder_with_a_space(self):
        library = self.folder / "libtorch"
        (library / "lib").mkdir(parents=True)
        header = library / "include/torch/csrc/api/include/torch/torch.h"
        header.parent.mkdir(parents=True)
        header.touch()
        (library / "build-version").write_text("2.13.0\n")
        (self.folder / "main.cpp").write_text("int main() {}\n")
        for name in ("torch_cpu", "c10"):
            subprocess.run([os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o",
                            library / f"lib/lib{name}.so"], check=True)
        (self.folder / "CMakeLists.txt").write_text(USER_OF_LIBTORCH)
        self.configure(self.folder, f"-DCMAKE_PREFIX_PATH={library}")
        self.cmake("--build", self.build)
        subprocess.run([self.build / "main"], check=True)

    def refused(self, *options):
        """What cmake writes to stderr, on one line."""
        done = subprocess.run([CMAKE, "-G", GENERATOR, "-S", SOURCE, "-B", self.build, "-DSKIM_TRAIN=OFF",
                               "-DSKIM_DEVELOPER=OFF", *options], capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        return " ".join(done.stderr.split())

    def test_if_there_is_no_mpi_the_message_names_the_option(self):
        self.assertIn("or build without MPI: -DSKIM_MPI=OFF", self.refused("-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON"))

    def test_if_there_are_no_headers_of_python_the_message_names_the_package(self):
        printed = self.refused("-DSKIM_MPI=OFF", "-DSKIM_PYTHON=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON")
        self.assertIn("needs Python 3.10 or newer, with its headers: apt install python3-dev", printed)

    def test_packages_of_another_project_are_its_own(self):
        self.folder.mkdir()
        for packs in (False, True):
            with self.subTest(packs=packs):
                more = "set(CPACK_GENERATOR TGZ)\ninclude(CPack)\n" if packs else ""
                (self.folder / "CMakeLists.txt").write_text(PARENT + more)
                self.configure(self.folder)
                config = self.build / "CPackConfig.cmake"
                self.assertEqual(config.exists(), packs)
                if packs:
                    settings = r'set\(CPACK_(?:PACKAGE_NAME|GENERATOR|COMPONENTS_ALL) "(.*)"'
                    self.assertEqual(re.findall(settings, config.read_text()), ["TGZ", "parent"])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
