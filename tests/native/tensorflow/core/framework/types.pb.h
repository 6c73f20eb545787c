#pragma once
namespace tensorflow {
enum DataType { DT_FLOAT = 1, DT_STRING = 7, DT_VARIANT = 21 };
}  // namespace tensorflow
