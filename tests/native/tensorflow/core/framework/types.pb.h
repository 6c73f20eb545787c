#pragma once
namespace tensorflow {
enum DataType { DT_FLOAT = 1, DT_STRING = 7 };
}  // namespace tensorflow
