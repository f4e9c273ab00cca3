"""The test suite: a package, so that its modules share tests.harness."""
