"""What tests of several rooms share: problems, arrays, arguments, devices, programs."""
